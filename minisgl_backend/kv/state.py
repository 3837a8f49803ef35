"""Recurrent states of rows, and what folds them: slots, and tails by row.

A *slot* holds a row's state at a *border*, a multiple of the page size. A row's *tail* holds the inputs of its tokens
behind the border, from which, with the state, outputs are computed; so a forward pass only appends. When the row
reaches the next page, a *fold* that the plan orders moves its state there. Slots are numbered from 1; slot 0 stands for
zeros where it is read, and is a sink where it is written. Tails are rings: position p is at p modulo their length.
Nothing needs clearing: a slot is written whole before it is read, and of tails only what was written is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl_backend.kv.layout import PagePart
from minisgl_backend.kv.state_config import StateConfig


class LayerState(NamedTuple):
    """States and tails of one layer; of `StatePool.stacks` of all layers alike, with the layer as first dimension.

    P: tokens of a page; k: most drafts of a row; c: channels of the convolution; w: its width. `states` and what goes
    into sums over tokens is float32, the rest in the model's dtype.
    """

    states: torch.Tensor  # [num_slots + 1, num_v_heads, k_dim, v_dim]
    conv: torch.Tensor  # [num_slots + 1, w - 1, c]  raw inputs of the last tokens before the border, oldest first
    tail_k: torch.Tensor  # [num_rows, num_k_heads, P + k, k_dim]  keys as the convolution leaves them: not normed
    tail_u: torch.Tensor  # [num_rows, num_v_heads, P + k, v_dim]  what a token adds to the state, along its key
    tail_g: torch.Tensor  # [num_rows, num_v_heads, P + k]  logarithm of a token's decay
    tail_conv: torch.Tensor  # [num_rows, w + 2 k, c]  raw inputs, of tokens before the border, too


@dataclass(frozen=True)
class StateLayout:
    """The states of one rank."""

    layers: tuple[StateConfig, ...]  # its share of the layers that have a state, in order
    dtype: torch.dtype  # of the model
    state_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, configs: Iterable[StateConfig | None], dtype: torch.dtype, tp_size: int = 1) -> StateLayout | None:
        """Of a model with these layers (None: a layer without a state); None where no layer has one."""
        layers = tuple(config.share(tp_size) for config in configs if config is not None)
        return cls(layers, dtype) if layers else None

    @property
    def distinct(self) -> tuple[StateConfig, ...]:
        """Each kind of layer once."""
        return tuple(dict.fromkeys(self.layers))

    def slot_parts(self, layer: StateConfig) -> tuple[PagePart, ...]:
        """What a slot consists of in one layer: `states` and `conv` of `LayerState`."""
        return (
            PagePart((layer.num_v_heads, layer.k_dim, layer.v_dim), self.state_dtype),
            PagePart((layer.conv_width - 1, layer.conv_channels), self.dtype),
        )

    def row_parts(self, layer: StateConfig, page_size: int, max_drafts: int) -> tuple[PagePart, ...]:
        """What a row's tail consists of in one layer: the rest of `LayerState`."""
        length = page_size + max_drafts
        return (
            PagePart((layer.num_k_heads, length, layer.k_dim), self.dtype),
            PagePart((layer.num_v_heads, length, layer.v_dim), self.state_dtype),
            PagePart((layer.num_v_heads, length), self.state_dtype),
            # A draft's input must not meet what an earlier entry of its step, or a fold, still reads.
            PagePart((layer.conv_width + 2 * max_drafts, layer.conv_channels), self.dtype),
        )

    @property
    def bytes_per_slot(self) -> int:
        """Device memory of one slot, all layers."""
        return sum(part.num_bytes for layer in self.layers for part in self.slot_parts(layer))

    def bytes_per_row(self, page_size: int, max_drafts: int) -> int:
        """Device memory of one row's tail, all layers; max_drafts: of a row in one step."""
        return sum(part.num_bytes for layer in self.layers for part in self.row_parts(layer, page_size, max_drafts))


class StatePool:
    """Slots 1 to `num_slots`, slot 0, and the tails of `num_rows` rows, the last of which pads captured graphs."""

    def __init__(
        self,
        layout: StateLayout,
        *,
        page_size: int,
        max_drafts: int,
        num_slots: int,
        num_rows: int,
        device: torch.device,
    ) -> None:
        self.layout, self.page_size, self.max_drafts, self.num_slots = layout, page_size, max_drafts, num_slots
        stacks = []
        for kind in layout.distinct:
            count = layout.layers.count(kind)
            parts = [(num_slots + 1, part) for part in layout.slot_parts(kind)]
            parts += [(num_rows, part) for part in layout.row_parts(kind, page_size, max_drafts)]
            stacks.append(
                LayerState(
                    *(torch.zeros((count, n, *part.shape), dtype=part.dtype, device=device) for n, part in parts)
                )
            )
        self.stacks: Sequence[LayerState] = tuple(stacks)  # one for each of `layout.distinct`
        self._layers: list[LayerState] = []
        for index, layer in enumerate(layout.layers):
            stack, place = stacks[layout.distinct.index(layer)], layout.layers[:index].count(layer)
            self._layers.append(LayerState(*(tensor[place] for tensor in stack)))

    def layer(self, index: int) -> LayerState:
        """Of the layer with this place among those that have a state."""
        return self._layers[index]
