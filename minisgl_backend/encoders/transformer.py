"""A vision transformer in slices of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from minisgl_backend.encoders.attention import Segments, rotate, windows
from minisgl_backend.encoders.base import Encoder
from minisgl_backend.encoders.parts import ACTIVATIONS, ALIGNED, GATES, Linear, PatchEmbedding, Table, norm
from minisgl_backend.kernels.candidate import on_gpu
from minisgl_backend.layers.encoder_config import TransformerConfig
from minisgl_backend.layers.weights import LayerContext

_MLP_ROWS = 16384  # that are in an MLP at once: bounds what its intermediate values take
_PADDED = 64  # what an MLP's size becomes a multiple of where it is none of ALIGNED


class Names(NamedTuple):
    """Of a layer's parts in checkpoints."""

    norms: tuple[str, str]
    qkv: Mapping[str, int]  # parts of the hidden size, by name
    o_proj: str
    up: tuple[str, ...]  # with a gate: the gate, and up
    down: str


@dataclass
class TransformerState:
    """Images between two slices."""

    hidden: torch.Tensor  # [num_patches, hidden_size]
    grid: tuple[int, int]  # patches of the first one: rows and columns
    whole: Segments
    within: Segments  # of layers with windows
    cos: torch.Tensor | None = None  # float32 [num_patches, head_dim / 2]
    sin: torch.Tensor | None = None
    order: torch.Tensor | None = None  # int64 [num_blocks]: of blocks, where windows have changed it
    planes: list[torch.Tensor] = field(default_factory=list)  # of the layers so far


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: TransformerConfig, names: Names, context: LayerContext) -> None:
        super().__init__()
        size, self._heads = config.hidden_size, config.num_heads
        first, second = names.norms
        self.norm1 = norm(config.norm, size, first, config.eps, context)
        self.norm2 = norm(config.norm, size, second, config.eps, context)
        qkv = {name: parts * size for name, parts in names.qkv.items()}
        self.qkv = Linear(size, qkv, config.bias, context)
        self.o_proj = Linear(size, {names.o_proj: size}, config.bias, context)
        self.up = Linear(size, dict.fromkeys(names.up, config.intermediate_size), config.bias, context)
        self.down = Linear(config.intermediate_size, {names.down: size}, config.bias, context)
        self._activation, self._gated = ACTIVATIONS[config.activation], config.gated
        self._fused = fuses(context)
        self._gate = GATES.get(config.activation) if self._fused else None

    def forward(self, state: TransformerState, segments: Segments) -> None:
        hidden = state.hidden
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self._heads, -1))
        if state.cos is not None and state.sin is not None:
            self._rotate(qkv, state.cos, state.sin)
        hidden = hidden + self.o_proj(segments.attend(qkv))
        del qkv
        for rows in hidden.split(_MLP_ROWS):
            rows += self._mlp(self.norm2(rows))
        state.hidden = hidden

    def align(self) -> None:
        """Pads the MLP with zeros where its size is none of ALIGNED."""
        size = self.down.weight.shape[1]
        if size % ALIGNED:
            more = -size % _PADDED
            self.up.pad_outputs(2 if self._gated else 1, more)
            self.down.pad_inputs(more)

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self._fused:
            from minisgl_backend.kernels.attention import segments

            segments.rotate(qkv, cos, sin)
        else:
            rotate(qkv, cos, sin)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        if not self._gated:
            return self.down(self._activation(up))
        if self._gate is not None:
            from minisgl_backend.kernels.elementwise import activate_mul

            return self.down(activate_mul(up, self._gate))
        gate, up = up.chunk(2, dim=-1)
        return self.down(self._activation(gate) * up)


def fuses(context: LayerContext) -> bool:
    """Whether this project's kernels serve an encoder there: 16 bits on a GPU."""
    facts = context.ops.facts
    return facts is not None and on_gpu(facts) and context.dtype != torch.float32


class Transformer(Encoder):
    """Subclasses have the embedding of patches, and what turns patches into vectors."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, names: Names, layers: str, context: LayerContext) -> None:
        """layers: what the names of all layers begin with."""
        super().__init__()
        self.config = config
        self._fused = fuses(context)
        self.layers = nn.ModuleList(
            [Block(config, names, context.at(f"{layers}.{index}")) for index in range(config.num_layers)]
        )

    @abstractmethod
    def embed(self, pixels: torch.Tensor, merge: int) -> torch.Tensor:
        """Of all patches, without their positions: see `PatchEmbedding`."""

    def plane(self, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """The plane of a layer's output."""
        raise NotImplementedError(f"{type(self).__name__} has no planes")

    def derive_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (Block, PatchEmbedding)):
                module.align()

    def start(self, pixels: torch.Tensor, merge: int, table: torch.Tensor | None = None) -> TransformerState:
        """`begin` of patches in blocks of `merge` by `merge`. table: of learned positions, [num_patches,
        hidden_size] in the order of the patches."""
        config = self.config
        tiles, height, width, _ = pixels.shape
        rows, columns = height // config.patch_size, width // config.patch_size
        hidden = self.embed(pixels, merge)
        if table is not None:
            hidden = hidden + table.repeat(tiles, 1)
        whole = Segments([rows * columns] * tiles, hidden.device, fused=self._fused)
        state = TransformerState(hidden, (rows, columns), whole, whole)
        places = _places(rows, columns, merge, hidden.device)
        if config.window is not None:
            block = merge * merge
            order, counts = windows(rows // merge, columns // merge, config.window // merge)
            state.order = torch.from_numpy(order).to(hidden.device)
            state.within = Segments([block * count for count in counts], hidden.device, fused=self._fused)
            state.hidden = hidden.unflatten(0, (-1, block))[state.order].flatten(0, 1)
            places = places.unflatten(0, (-1, block))[state.order].flatten(0, 1)
        if config.rope_theta is not None:
            state.cos, state.sin = self._angles(config.rope_theta, places)
        return state

    def run(self, state: TransformerState, first: int, last: int) -> None:
        config = self.config
        for index in range(first, last):
            sees_all = config.window is None or index in config.full_layers
            self.layers[index](state, state.whole if sees_all else state.within)
            if index in config.plane_layers:
                state.planes.append(self.plane(config.plane_layers.index(index), state.hidden))

    def _angles(self, theta: float, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [num_patches, head_dim / 2]: half of the pairs turn by the row, half by the
        column."""
        size = self.config.head_dim
        if self.config.rope_split == "alike":
            exponents = torch.arange(0, size // 2, 2, dtype=torch.float32, device=places.device) / (size // 2)
            by_row = by_column = 1.0 / theta**exponents
        else:
            exponents = torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size
            by_row, by_column = (1.0 / theta ** exponents[start::2] for start in (0, 1))
        row, column = places.float().unbind(1)
        angles = torch.cat([torch.outer(row, by_row), torch.outer(column, by_column)], dim=1)
        return angles.cos(), angles.sin()


def _places(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch, int64 [num_patches, 2], in blocks."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([row, column], dim=-1).view(rows // merge, merge, columns // merge, merge, 2)
    return places.transpose(1, 2).reshape(-1, 2).to(device)


__all__ = ["Names", "Table", "Transformer", "TransformerState"]
