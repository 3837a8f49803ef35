"""The encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_backend.encoders.parts import Linear, PatchEmbedding, Table, norm
from minisgl_backend.encoders.transformer import Names, Transformer, TransformerState
from minisgl_backend.layers.encoder_config import QwenVisionConfig
from minisgl_backend.layers.weights import LayerContext

_NORMS, _QKV, _O_PROJ = ("norm1", "norm2"), MappingProxyType({"attn.qkv": 3}), "attn.proj"
_NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "2": Names(_NORMS, _QKV, _O_PROJ, ("mlp.fc1",), "mlp.fc2"),
        "2.5": Names(_NORMS, _QKV, _O_PROJ, ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
        "3": Names(_NORMS, _QKV, _O_PROJ, ("mlp.linear_fc1",), "mlp.linear_fc2"),
    }
)
_FRAMES = 2  # of a patch; an image's are alike


class Merger(nn.Module):
    """A block of patches becomes a vector: norm, before they are joined or after, then an MLP."""

    def __init__(self, config: QwenVisionConfig, context: LayerContext, *, joined: bool = False) -> None:
        """joined: the norm is that of the joined patches."""
        super().__init__()
        self._size = size = config.hidden_size * config.merge**2
        self._joined = joined
        name, up, down = (
            ("norm", "linear_fc1", "linear_fc2") if config.generation == "3" else ("ln_q", "mlp.0", "mlp.2")
        )
        self.norm = norm(config.norm, size if joined else config.hidden_size, name, 1e-6, context)
        self.up = Linear(size, {up: size}, True, context)
        self.down = Linear(size, {down: config.out_size}, True, context)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size] -> [num_blocks, out_size]."""
        joined = hidden.view(-1, self._size)
        normed = self.norm(joined) if self._joined else self.norm(hidden).view(-1, self._size)
        return self.down(F.gelu(self.up(normed)))


class QwenVision(Transformer):
    """Patches are kept in blocks of those that become one vector; with windows, blocks by windows."""

    config: QwenVisionConfig

    def __init__(self, config: QwenVisionConfig, context: LayerContext) -> None:
        super().__init__(config, _NAMES[config.generation], "blocks", context)
        self.patches = PatchEmbedding(
            config.hidden_size,
            config.patch_size,
            "patch_embed.proj",
            config.normalisation,
            context,
            frames=_FRAMES,
            bias=config.patch_bias,
        )
        self.merger = Merger(config, context.at("merger"))
        self.plane_mergers = nn.ModuleList(
            [
                Merger(config, context.at(f"deepstack_merger_list.{index}"), joined=True)
                for index in range(len(config.plane_layers))
            ]
        )
        shape = (config.num_positions, config.hidden_size)
        self.positions = Table("pos_embed.weight", shape, context) if config.num_positions else None

    def embed(self, pixels: torch.Tensor, merge: int) -> torch.Tensor:
        return self.patches(pixels, merge)

    def plane(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        merged: torch.Tensor = self.plane_mergers[number](hidden)
        return merged

    def finish(self, state: TransformerState) -> torch.Tensor:
        merged: torch.Tensor = self.merger(state.hidden)
        if state.layout.order is not None:
            merged = torch.empty_like(merged).index_copy_(0, state.layout.order, merged)
        return torch.cat([merged, *state.planes], dim=1) if state.planes else merged

    def table(self, rows: int, columns: int) -> torch.Tensor | None:
        """Interpolated to the image's grid so that corners meet."""
        if self.positions is None:
            return None
        config, weight = self.config, self.positions.weight
        side, merge = int(config.num_positions**0.5), config.merge
        grid = weight.view(side, side, -1)
        top, bottom, down = _between(rows, side, weight.device)
        left, right, across = _between(columns, side, weight.device)
        down, across = down[:, None, None], across[None, :, None]
        above = grid[top][:, left].float() * (1 - across) + grid[top][:, right].float() * across
        below = grid[bottom][:, left].float() * (1 - across) + grid[bottom][:, right].float() * across
        table = (above * (1 - down) + below * down).to(weight.dtype)
        blocks = table.view(rows // merge, merge, columns // merge, merge, -1)
        return blocks.transpose(1, 2).reshape(rows * columns, -1)


def _between(count: int, side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `count` places spread over an axis of `side`: the entry before, the one behind, and the latter's share."""
    at = torch.linspace(0, side - 1, count, dtype=torch.float32, device=device)
    before = at.floor().long()
    return before, (before + 1).clamp(max=side - 1), at - before
