"""Tiny random checkpoints of families that see, saved by transformers itself, and what transformers makes of pixels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers

from tests.parity.checkpoint_options import DELTA, MOE, SIZES

Grid = tuple[int, int, int]
_SIZES = {**SIZES, "hidden_size": 64}
_QWEN = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


class Family(NamedTuple):
    """One checkpoint."""

    architecture: str
    vision: dict[str, Any]
    text: Mapping[str, Any] = MappingProxyType({})
    around: Mapping[str, Any] = MappingProxyType({})
    patch: int = 4
    merge: int = 2
    sizes: tuple[tuple[int, ...], ...] = ((32, 48), (24, 16), (8, 8))  # pixels of images: (tiles,) height and width
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = ((0.5,) * 3, (0.5,) * 3)
    tiled: Mapping[int, tuple[Grid, int]] = MappingProxyType({})  # `Content.grid` and tokens, by tiles

    def grid(self, *shape: int) -> Grid:
        """`Content.grid`: what rows and columns of positions are made of."""
        tiles, height, width = (1, *shape)[-3:]
        return self.tiled[tiles][0] if self.tiled else (1, height // self.patch, width // self.patch)

    def tokens(self, *shape: int) -> int:
        """Vectors of an image."""
        if self.tiled:
            return self.tiled[(1, *shape)[-3]][1]
        _, rows, columns = self.grid(*shape)
        return rows // self.merge * (columns // self.merge)


DELTA_TYPES = ["linear_attention", "full_attention"] * 2
_PARTIAL_MROPE = {"rope_parameters": {**_rope(2, 1, 1)["rope_parameters"], "partial_rotary_factor": 0.5}}
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3}
_SQUARE = {**_SIGLIP, "image_size": 24, "patch_size": 4}
_CLIP_TOWER = {**_SQUARE, "model_type": "clip_vision_model"}
_ANYRES, _PINPOINTS = {"image_size": 16}, {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
_GLM_ROPE = {"rope_parameters": {**_rope(1, 1, 2)["rope_parameters"], "partial_rotary_factor": 0.5}}
_GLM_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5}
TOWERS: dict[str, Family] = {  # transformers' own, around decoders of other families
    "llava": Family(
        "LlavaForConditionalGeneration",
        _CLIP_TOWER,
        {"model_type": "llama"},
        sizes=((24, 24),),
        mean_std=_CLIP,
        tiled={1: ((1, 0, 0), 36)},
    ),
    "llava_next": Family(
        "LlavaNextForConditionalGeneration",
        {**_CLIP_TOWER, **_ANYRES},
        {"model_type": "mistral"},
        _PINPOINTS,
        sizes=((3, 16, 16), (5, 16, 16)),
        mean_std=_CLIP,
        tiled={3: ((3, 11, 32), 34), 5: ((5, 40, 30), 72)},
    ),
    "llava_of_pixtral": Family(
        "LlavaForConditionalGeneration",
        {**_SIGLIP, "model_type": "pixtral", "image_size": 64, "patch_size": 4},
        {"model_type": "mistral", "head_dim": 16},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        merge=1,
        sizes=((24, 16), (8, 12)),
        mean_std=_CLIP,
    ),
    "granite_vision": Family(  # which multiplies what it gets in place of embeddings
        "LlavaNextForConditionalGeneration",
        {**_SQUARE, **_ANYRES, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        {**_PINPOINTS, "vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"},
        sizes=((3, 16, 16), (5, 16, 16)),
        tiled={3: ((3, 11, 32), 34), 5: ((5, 40, 30), 72)},
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        {**_SQUARE, **_ANYRES, "model_type": "siglip_vision_model", "vision_use_head": False},
        {"model_type": "qwen2"},
        {**_PINPOINTS, "vision_aspect_ratio": "anyres_max_2"},
        sizes=((3, 16, 16), (5, 16, 16)),
        tiled={3: ((3, 11, 32), 34), 5: ((5, 40, 40), 46)},
    ),
    "gemma4": Family(  # an image sees itself in layers with a window alone
        "Gemma4ForConditionalGeneration",
        {
            **_SIGLIP,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 64,
            "standardize": True,
        },
        {
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": False},
            **{"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "use_bidirectional_attention": "vision",
        },
        {"audio_config": None},
        merge=3,
        sizes=((36, 36), (24, 48), (12, 12)),
        mean_std=((0.0,) * 3, (1.0,) * 3),
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        {**_SQUARE, "image_size": [24, 24], "patch_size": [4, 4]},
        {"model_type": "qwen3", "head_dim": 16},
        sizes=((1, 24, 24), (3, 24, 24)),
        tiled={1: ((1, 1, 1), 9), 3: ((3, 1, 2), 27)},
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        _SQUARE,
        {"model_type": "llama"},
        sizes=((1, 24, 24), (3, 24, 24)),
        tiled={1: ((1, 0, 0), 9), 3: ((3, 1, 2), 27)},
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        _SQUARE,
        {"model_type": "llama"},
        {"scale_factor": 3},
        sizes=((1, 24, 24), (3, 24, 24)),
        tiled={1: ((1, 0, 0), 4), 3: ((3, 1, 2), 12)},
    ),
    "glm4v": Family(
        "Glm4vForConditionalGeneration",
        {**_QWEN, "depth": 3, "image_size": 24},
        _GLM_ROPE,
        mean_std=_CLIP,
    ),
    "glm4v_moe": Family(
        "Glm4vMoeForConditionalGeneration",
        {**_QWEN, "depth": 3, "image_size": 24},
        {**_GLM_ROPE, **_GLM_MOE},
        mean_std=_CLIP,
    ),
    "glm46v": Family(
        "Glm46VForConditionalGeneration",
        {**_QWEN, "depth": 3, "image_size": 24, "model_type": "glm4v_vision"},
        {"model_type": "glm4v_text", **_GLM_ROPE},
        mean_std=_CLIP,
    ),
    "glm46v_moe": Family(
        "Glm46VForConditionalGeneration",
        {**_QWEN, "depth": 3, "image_size": 24, "model_type": "glm4v_vision"},
        {"model_type": "glm4v_moe_text", **_GLM_ROPE, **_GLM_MOE},
        mean_std=_CLIP,
    ),
}
FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        "Qwen2VLForConditionalGeneration",
        {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        _rope(2, 3, 3),
        mean_std=_CLIP,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {**_QWEN, "depth": 3, "fullatt_block_indexes": [1], "window_size": 16},
        _rope(2, 3, 3),
        sizes=((40, 56), (24, 16), (8, 8)),
        mean_std=_CLIP,
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {**_QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36},
        {"head_dim": 16, **_rope(4, 2, 2)},
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        {**_QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36},
        {"head_dim": 16, "mlp_only_layers": [1], **MOE, **_rope(4, 2, 2)},
    ),
    "qwen3_5": Family(  # whose decoder has states
        "Qwen3_5ForConditionalGeneration",
        {**_QWEN, "depth": 3, "num_position_embeddings": 36},
        {**DELTA, "layer_types": DELTA_TYPES, **_PARTIAL_MROPE},
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        {**_SIGLIP, "image_size": 24, "patch_size": 4, "vision_use_head": False},
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"mm_tokens_per_image": 9},
        sizes=((24, 24),),
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        {**_SIGLIP, "model_type": "pixtral", "image_size": 64, "patch_size": 4},
        {"model_type": "mistral", "head_dim": 16},
        {"vision_feature_layer": -1},
        sizes=((32, 48), (24, 16)),  # of an image of one token transformers loses an axis
        mean_std=_CLIP,
    ),
    **TOWERS,
}


def save(name: str, folder: Path, **text: Any) -> Any:
    """Saves the checkpoint and returns transformers' model. `text`: other values of its text config."""
    family = FAMILIES[name]
    model_class = getattr(transformers, family.architecture)
    layers = family.text.get("layer_types")
    sizes = {**_SIZES, **({"num_hidden_layers": len(layers)} if layers else {}), **family.text, **text}
    config = model_class.config_class(text_config=sizes, vision_config=dict(family.vision), **family.around)
    torch.manual_seed(len(name))
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # biases and norms, too, which are 0 and 1 at first
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    mean, std = family.mean_std
    processor = {"image_mean": list(mean), "image_std": list(std)}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    """uint8 [tiles, height, width, 3] of a size of `Family.sizes`."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randint(0, 256, (*(1, *shape)[-3:], 3), dtype=torch.uint8, generator=generator)


def _normalised(family: Family, image: torch.Tensor) -> torch.Tensor:
    """float32 [tiles, 3, height, width]."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in family.mean_std)
    return (image.permute(0, 3, 1, 2).float() / 255 - mean) / std


def _qwen_inputs(family: Family, image: torch.Tensor) -> dict[str, Any]:
    side, merge = family.patch, family.merge
    _, rows, columns = grid = family.grid(image.shape[1], image.shape[2])
    one = _normalised(family, image).view(3, rows // merge, merge, side, columns // merge, merge, side)
    patches = one.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, 3, 1, side, side)
    both = patches.expand(-1, -1, 2, -1, -1).reshape(rows * columns, -1)
    return {"pixel_values": both, "image_grid_thw": torch.tensor([grid])}


def _sized_inputs(family: Family, image: torch.Tensor) -> dict[str, Any]:
    return {"pixel_values": _normalised(family, image), "image_sizes": torch.tensor([image.shape[1:3]])}


def _tiled_inputs(family: Family, image: torch.Tensor) -> dict[str, Any]:
    return {"pixel_values": _normalised(family, image)[None]}


def _anyres_inputs(family: Family, image: torch.Tensor) -> dict[str, Any]:
    return {**_tiled_inputs(family, image), "image_sizes": torch.tensor([family.grid(*image.shape[:3])[1:]])}


def _positioned_inputs(family: Family, image: torch.Tensor) -> dict[str, Any]:
    side, (_, rows, columns) = family.patch, family.grid(image.shape[1], image.shape[2])
    one = _normalised(family, image)[0].view(3, rows, side, columns, side)
    places = torch.tensor([[[column, row] for row in range(rows) for column in range(columns)]])
    patches = one.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    missing = 81 - rows * columns  # up to the patches of the largest, as transformers' processor does it
    pad = torch.nn.functional.pad
    return {
        "pixel_values": pad(patches, (0, 0, 0, missing)),
        "image_position_ids": pad(places, (0, 0, 0, missing), value=-1),
    }


_INPUTS: dict[str, Callable[[Family, torch.Tensor], dict[str, Any]]] = {
    "granite_vision": _anyres_inputs,
    "gemma4": _positioned_inputs,
    "mistral3": _sized_inputs,
    "llava_of_pixtral": _sized_inputs,
    "idefics3": _tiled_inputs,
    "smolvlm": _tiled_inputs,
    "llava_next": _anyres_inputs,
    "llava_onevision": _anyres_inputs,
    "glm46v": _qwen_inputs,
    "glm46v_moe": _qwen_inputs,
    "glm4v": _qwen_inputs,
    "glm4v_moe": _qwen_inputs,
}


def inputs(name: str, image: torch.Tensor) -> dict[str, Any]:
    """What transformers' model is given of an image."""
    if name.startswith("qwen"):
        return _qwen_inputs(FAMILIES[name], image)
    make = _INPUTS.get(name, lambda family, one: {"pixel_values": _normalised(family, one)})
    return make(FAMILIES[name], image)


@torch.inference_mode()
def expected_vectors(name: str, model: Any, image: torch.Tensor) -> torch.Tensor:
    """[num_tokens, planes * hidden_size] of transformers' own encoder."""
    found = model.get_image_features(**inputs(name, image))
    vectors = found.pooler_output
    rows = torch.cat(list(vectors)) if isinstance(vectors, (list, tuple)) or vectors.dim() == 3 else vectors
    planes = [one[0] for one in getattr(found, "deepstack_features", None) or []]
    return torch.cat([rows, *planes], dim=1)
