"""Towers and projectors as transformers builds them, with its own code: whole tiles, some of them a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from minisgl_backend.encoders.base import Encoder
from minisgl_backend.encoders.names import NAMES
from minisgl_backend.layers.encoder_config import TowerConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart

Grid = tuple[int, int, int]


class Family(NamedTuple):
    """How transformers is called."""

    model_class: str  # of the model without its output projection
    decoder: str  # that model's attribute, which is left out
    vectors: Callable[[Any, torch.Tensor, Grid], Any]  # of the model and normalised tiles [n, 3, height, width]
    # Of the model and all tiles' vectors [tiles, num_tokens, out_size]: those of the image [num_vectors, out_size].
    joined: Callable[[Any, torch.Tensor, Grid], torch.Tensor] = lambda model, tiles, grid: tiles.flatten(0, 1)


def _by_tile(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    return model.get_image_features(pixel_values=tiles).pooler_output


def _one_sample(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    return model.get_image_features(pixel_values=tiles[None]).pooler_output


def _llava(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    if model.config.vision_config.model_type != "pixtral":
        return _by_tile(model, tiles, grid)
    sizes = torch.tensor([tiles.shape[2:]], device=tiles.device)
    return model.get_image_features(pixel_values=tiles, image_sizes=sizes).pooler_output


def _unpacked(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    """LLaVA-NeXT's before they are put together, by LLaVA's code, which asks for the same parts."""
    return transformers.LlavaModel.get_image_features(model, pixel_values=tiles).pooler_output


def _packed(model: Any, tiles: torch.Tensor, grid: Grid) -> torch.Tensor:
    config = model.config
    more: dict[str, Any] = {}
    if config.model_type == "llava_next":
        more["vision_feature_select_strategy"] = config.vision_feature_select_strategy
    else:
        more["vision_aspect_ratio"] = config.vision_aspect_ratio
    sizes = torch.tensor([grid[1:]])
    packed: torch.Tensor = model.pack_image_features([tiles], sizes, image_newline=model.image_newline, **more)[0][0]
    return packed


def _patches(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    """GLM-4.1V's and later ones, of one tile: in blocks of merged patches, each frame of a pair the same."""
    config = model.config.vision_config
    side, merge = config.patch_size, config.spatial_merge_size
    _, rows, columns = grid
    blocks = tiles.view(3, rows // merge, merge, side, columns // merge, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
    frames = blocks.reshape(rows * columns, 3, 1, side, side).expand(-1, -1, config.temporal_patch_size, -1, -1)
    patches, grids = frames.reshape(rows * columns, -1), torch.tensor([grid], device=tiles.device)
    return model.get_image_features(pixel_values=patches, image_grid_thw=grids).pooler_output


def _positioned(model: Any, tiles: torch.Tensor, grid: Grid) -> Any:
    """Gemma 4's, of one tile: patches row by row, with their columns and rows."""
    _, rows, columns = grid
    side = model.config.vision_config.patch_size
    patches = tiles.view(3, rows, side, columns, side).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    places = torch.cartesian_prod(*(torch.arange(size, device=tiles.device) for size in (rows, columns)))
    return model.get_image_features(pixel_values=patches, image_position_ids=places.flip(1)[None]).pooler_output


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma4": Family("Gemma4Model", "language_model", _positioned),
        "glm46v": Family("Glm46VModel", "language_model", _patches),
        "glm4v": Family("Glm4vModel", "language_model", _patches),
        "glm4v_moe": Family("Glm4vMoeModel", "language_model", _patches),
        "idefics3": Family("Idefics3Model", "text_model", _one_sample),
        "internvl": Family("InternVLModel", "language_model", _by_tile),
        "llava": Family("LlavaModel", "language_model", _llava),
        "llava_next": Family("LlavaNextModel", "language_model", _unpacked, _packed),
        "llava_onevision": Family("LlavaOnevisionModel", "language_model", _unpacked, _packed),
        "smolvlm": Family("SmolVLMModel", "text_model", _one_sample),
    }
)


@dataclass
class _State:
    """An image between two steps."""

    pixels: torch.Tensor  # uint8 [tiles, height, width, 3]
    grid: Grid
    vectors: list[torch.Tensor]  # [n, num_tokens, out_size], of the tiles so far

    @property
    def num_done(self) -> int:
        return sum(map(len, self.vectors))


class TransformersTower(Encoder):
    """Tiles are computed in the same groups however an image's steps are cut, so that no bit depends on these."""

    config: TowerConfig

    def __init__(self, config: TowerConfig, context: LayerContext) -> None:
        super().__init__()
        self.config = config
        self._family = FAMILIES[config.values["model_type"]]
        self._group = 1 if context.device.type == "cpu" else config.tiles
        self._dtype = context.dtype
        self.tower = _Tower(_build(config.values, self._family, context.device, context.dtype))
        mean, std = config.normalisation.mean, config.normalisation.std
        self._mean, self._std = (torch.tensor(one, device=context.device).view(3, 1, 1) for one in (mean, std))

    def begin(self, pixels: torch.Tensor, grid: Grid) -> _State:
        return _State(pixels, grid, [])

    def run(self, state: _State, first: int, last: int) -> None:
        groups = -(-len(state.pixels) // self._group)
        end = min(groups * last // self.config.num_layers * self._group, len(state.pixels))
        while state.num_done < end:
            tiles = state.pixels[state.num_done :][: self._group].permute(0, 3, 1, 2).float() * (1 / 255)
            normalised = ((tiles - self._mean) / self._std).to(self._dtype)
            found = self._family.vectors(self.tower.model, normalised, state.grid)
            stacked = found if isinstance(found, torch.Tensor) else torch.stack(list(found))
            state.vectors.append(stacked.reshape(len(tiles), -1, self.config.out_size))

    def finish(self, state: _State) -> torch.Tensor:
        vectors = self._family.joined(self.tower.model, torch.cat(state.vectors), state.grid)
        return vectors * self.config.scale if self.config.scale != 1 else vectors


class _Tower(WeightedLayer):
    """Names of tensors are those of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def weight_parts(self) -> list[WeightPart]:
        return [
            WeightPart(name=NAMES.here(name), shape=tuple(parameter.shape), target=parameter)
            for name, parameter in self.model.state_dict(keep_vars=True).items()  # also buffers that are kept
        ]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, 0.02, generator=generator)


def _build(values: Mapping[str, Any], family: Family, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Without weights; what is computed from the config is."""
    plain = {key: value for key, value in copy.deepcopy(dict(values)).items() if key != "quantization_config"}
    config = transformers.CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
    model_class = getattr(transformers, family.model_class)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
    setattr(model, family.decoder, None)
    model = model.to_empty(device=device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True  # by the checkpoint
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()  # buffers, which checkpoints do not have
    return model


__all__ = ["FAMILIES", "TransformersTower"]
