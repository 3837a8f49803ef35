"""A vision transformer in slices of layers."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from minisgl_backend.arrays import Int64Array
from minisgl_backend.encoder_limits import num_parts
from minisgl_backend.encoders.attention import Segments, rotate, windows
from minisgl_backend.encoders.base import Encoder, TimedCall
from minisgl_backend.encoders.graphs import MOST_PATCHES, EncoderGraphs, Shapes
from minisgl_backend.encoders.parts import ACTIVATIONS, ALIGNED, GATES, Linear, PatchEmbedding, Table, norm
from minisgl_backend.kernels.candidate import on_gpu
from minisgl_backend.kernels.upload import to_device
from minisgl_backend.layers.encoder_config import TransformerConfig
from minisgl_backend.layers.weights import LayerContext

_MLP_ROWS = 16384  # that are in an MLP at once: bounds what its intermediate values take
_LAYOUTS = 8  # of small images that are kept
_TIMED_PARTS = 4  # in a call, at most; one of more takes as many times as long
_PADDED = 64  # what an MLP's size becomes a multiple of where it is none of ALIGNED


class Names(NamedTuple):
    """Of a layer's parts in checkpoints."""

    norms: tuple[str, str]
    qkv: Mapping[str, int]  # parts of the hidden size, by name
    o_proj: str
    up: tuple[str, ...]  # with a gate: the gate, and up
    down: str


@dataclass(frozen=True)
class Layout:
    """What follows from the shapes of images that are encoded together."""

    merge: int  # patches are in blocks of so many by as many
    grid: tuple[int, int]  # patches of the first one: rows and columns
    place: torch.Tensor  # int64 [num_patches, 2]: row and column
    whole: Segments
    within: Segments  # of layers with windows
    cos: torch.Tensor | None  # float32 [num_patches, head_dim / 2]
    sin: torch.Tensor | None
    order: torch.Tensor | None  # int64 [num_blocks]: of blocks, where windows have changed it
    table: torch.Tensor | None  # [num_patches, hidden_size]: learned positions, before that


@dataclass
class TransformerState:
    """Images between two slices."""

    layout: Layout
    hidden: torch.Tensor  # [num_patches, hidden_size]
    qkv: torch.Tensor  # [num_patches, 3, num_heads, head_dim]: of the next layer, rotated
    later: torch.Tensor | None = None  # of the layer behind that one, of the patches that are through
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

    def project(self, state: TransformerState, first: int, last: int) -> torch.Tensor:
        """Queries, keys and values, rotated, of the patches `first` to `last` - 1."""
        qkv = self.qkv(self.norm1(state.hidden[first:last])).unflatten(-1, (3, self._heads, -1))
        if state.layout.cos is not None and state.layout.sin is not None:
            self._rotate(qkv, state.layout.cos[first:last], state.layout.sin[first:last])
        return qkv

    def forward(self, state: TransformerState, segments: Segments, first: int, last: int) -> None:
        """Of the patches `first` to `last` - 1, in place."""
        hidden = state.hidden[first:last]
        hidden += self.o_proj(segments.attend(state.qkv, first, last))
        for rows in hidden.split(_MLP_ROWS):
            rows += self._mlp(self.norm2(rows))

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
    in_blocks = True  # patches are kept in blocks of `config.merge` by as many, those of one vector

    def __init__(self, config: TransformerConfig, names: Names, layers: str, context: LayerContext) -> None:
        """layers: what the names of all layers begin with."""
        super().__init__()
        self.config = config
        self._fused, self._device = fuses(context), context.device
        self._graphs = EncoderGraphs(self._whole) if self._fused else None
        self._layouts: OrderedDict[Shapes, Layout] = OrderedDict()
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

    def table(self, rows: int, columns: int) -> torch.Tensor | None:
        """Learned positions of a tile's patches, [rows * columns, hidden_size] in their order; None: there are none."""
        return None

    def begin(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> TransformerState:
        return self._begin([pixels])

    def encode_all(self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]) -> list[torch.Tensor]:
        every = [pixels for pixels, _ in images]
        areas = [pixels[..., 0].numel() // self.config.patch_size**2 for pixels in every]
        captured = self._graphs is not None and sum(areas) <= MOST_PATCHES
        vectors = self._graphs.run(every) if captured and self._graphs is not None else self._whole(every)
        return list(vectors.split([area // self.config.merge**2 for area in areas]))

    def _whole(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        state = self._begin(images)
        for layer in range(self.config.num_layers):
            self._run(state, layer, 0, len(state.hidden))
        return self.finish(state)

    def _begin(self, images: Sequence[torch.Tensor]) -> TransformerState:
        layout = self._layout_of(tuple(tuple(pixels.shape) for pixels in images))
        hidden = torch.cat([self.embed(pixels, layout.merge) for pixels in images])
        if layout.table is not None:
            hidden += layout.table
        if layout.order is not None:
            hidden = hidden.unflatten(0, (-1, layout.merge**2))[layout.order].flatten(0, 1)
        state = TransformerState(layout, hidden, hidden)
        state.qkv = self._block(0).project(state, 0, len(hidden))
        return state

    def _layout_of(self, shapes: Shapes) -> Layout:
        """Of small images kept, those used last."""
        if (found := self._layouts.get(shapes)) is None:
            found = self._make_layout(shapes)
            if len(found.place) <= MOST_PATCHES:
                self._layouts[shapes] = found
                if len(self._layouts) > _LAYOUTS:
                    self._layouts.popitem(last=False)
        else:
            self._layouts.move_to_end(shapes)
        return found

    def _make_layout(self, shapes: Shapes) -> Layout:
        config, side, device = self.config, self.config.patch_size, self._device
        merge = config.merge if self.in_blocks else 1
        grids = [(height // side, width // side) for _, height, width, _ in shapes]
        tables, places, lengths = [], [], []
        for (tiles, *_), (rows, columns) in zip(shapes, grids, strict=True):
            table = self.table(rows, columns)
            tables += [] if table is None else [table] * tiles
            places.append(_places(rows, columns, merge, device).repeat(tiles, 1))
            lengths += [rows * columns] * tiles
        place = torch.cat(places)
        whole = within = self._segments(lengths, device)
        order = None
        if config.window is not None:
            by_window, counts = _windows(grids, merge, config.window // merge)
            order, block = to_device(by_window, device), merge * merge
            place = place.unflatten(0, (-1, block))[order].flatten(0, 1)
            within = self._segments([block * count for count in counts], device)
        cos = sin = None
        if config.rope_theta is not None:
            cos, sin = self._angles(config.rope_theta, place)
        return Layout(merge, grids[0], place, whole, within, cos, sin, order, torch.cat(tables) if tables else None)

    def _segments(self, lengths: Sequence[int], device: torch.device) -> Segments:
        return Segments(lengths, device, part=self.config.part_patches, fused=self._fused)

    def run(self, state: TransformerState, first: int, last: int) -> None:
        config, size = self.config, len(state.hidden)
        parts = num_parts(size, config.part_patches)
        while first < last:
            layer, part = divmod(first, parts)
            stop = min(parts, part + last - first)
            self._run(state, layer, part * config.part_patches, min(size, stop * config.part_patches))
            first += stop - part

    def timed_calls(self) -> Iterator[TimedCall]:
        config = self.config
        layer = config.full_layers[0] if config.full_layers else 0
        for shape in config.timed_shapes():
            noise = torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device)
            run = partial(self._run, self._begin([noise]), layer, 0)
            seen = shape[1] * shape[2] // config.patch_size**2
            for parts in range(1, _TIMED_PARTS + 1):
                yield TimedCall(parts, seen, partial(run, parts * config.part_patches))
            del run  # before there is another image's

    def _run(self, state: TransformerState, layer: int, first: int, last: int) -> None:
        """Patches `first` to `last` - 1 through a layer, and their projection in the next one."""
        config, size = self.config, len(state.hidden)
        sees_all = config.window is None or layer in config.full_layers
        self._block(layer).forward(state, state.layout.whole if sees_all else state.layout.within, first, last)
        if layer + 1 < config.num_layers:
            qkv = self._block(layer + 1).project(state, first, last)
            if last - first == size:
                state.qkv = qkv
            else:
                state.later = torch.empty_like(state.qkv) if state.later is None else state.later
                state.later[first:last] = qkv
                if last == size:
                    state.qkv, state.later = state.later, state.qkv
        if last == size and layer in config.plane_layers:
            state.planes.append(self.plane(config.plane_layers.index(layer), state.hidden))

    def _block(self, layer: int) -> Block:
        return self.layers[layer]  # type: ignore[return-value]  # of a ModuleList

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


def _windows(grids: Sequence[tuple[int, int]], merge: int, side: int) -> tuple[Int64Array, list[int]]:
    """`attention.windows` of images that follow one another, in blocks."""
    orders: list[Int64Array] = []
    counts: list[int] = []
    before = 0
    for rows, columns in grids:
        order, sizes = windows(rows // merge, columns // merge, side)
        orders.append(order + before)
        counts += sizes
        before += len(order)
    return np.concatenate(orders), counts


def _places(rows: int, columns: int, merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch, int64 [num_patches, 2], in blocks."""
    axes = (torch.arange(size, device=device) for size in (rows, columns))
    row, column = torch.meshgrid(*axes, indexing="ij")
    places = torch.stack([row, column], dim=-1).view(rows // merge, merge, columns // merge, merge, 2)
    return places.transpose(1, 2).reshape(-1, 2)


__all__ = ["Names", "Table", "Transformer", "TransformerState"]
