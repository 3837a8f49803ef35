"""What adapters add to the outputs of a linear layer, in torch; and the factors that every implementation takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from minisgl_backend.kernels import torch_ops
from minisgl_backend.kernels.linear.call import GemmCall

_ALIGNMENT = 64  # numbers, of what a slot has of each weight


@dataclass(frozen=True)
class LoraLayout:
    """What a slot has for one weight of a rank: A, then B."""

    sizes: tuple[int, ...]  # of the weight's outputs
    size_in: int
    rank: int

    @property
    def size(self) -> int:
        """Numbers, with what aligns the next weight's."""
        numbers = self.rank * (len(self.sizes) * self.size_in + sum(self.sizes))
        return -(-numbers // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class LoraFactors:
    """Of all slots, for the outputs of one weight of this rank. Slots count from 1; 0 stands for no adapter.

    Each output has a rank of its own range of `a`. Ranks below `rank` are filled up with zeros, and B has the scale.
    """

    a: torch.Tensor  # [num_slots, outputs * rank, inputs], each slot contiguous
    b: torch.Tensor  # [num_slots, size of all outputs, rank], likewise
    ends: tuple[int, ...]  # the end of each output among the rows of b
    rank: int
    # int32 [num_tiles, 3]: tiles of up to `tile_out` rows of b: the first one, the one behind it, and their output.
    tiles: torch.Tensor
    first_ranks: torch.Tensor  # int32 [size of all outputs]: where the ranks of each begin
    tile_out: int

    @classmethod
    def within(cls, memory: torch.Tensor, layout: LoraLayout) -> LoraFactors:
        """memory: [num_slots, layout.size]; rows may be apart."""
        rank, ends, tiles = layout.rank, tuple(accumulate(layout.sizes)), []
        tile = 256 if rank <= 16 else 128 if rank <= 32 else 64  # whose B a program has in registers
        for output, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            tiles += [(row, min(row + tile, end), output) for row in range(start, end, tile)]
        ranks = len(layout.sizes) * rank
        first_ranks = torch.arange(0, ranks, rank, dtype=torch.int32).repeat_interleave(torch.tensor(layout.sizes))
        of_a = ranks * layout.size_in
        return cls(
            a=memory[:, :of_a].unflatten(1, (ranks, layout.size_in)),
            b=memory[:, of_a : of_a + ends[-1] * rank].unflatten(1, (ends[-1], rank)),
            ends=ends,
            rank=rank,
            tiles=torch.tensor(tiles, dtype=torch.int32, device=memory.device),
            first_ranks=first_ranks.to(memory.device),
            tile_out=tile,
        )

    def fill(self, index: int, output: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """One output's factors in a slot of zeros, by its index: a [its rank, inputs], b [its size, its rank]."""
        rank, first, start = len(a), output * self.rank, self.ends[output - 1] if output else 0
        self.a[index, first : first + rank] = a.to(self.a.dtype)
        self.b[index, start : self.ends[output], :rank] = b.to(self.b.dtype)


Multiply = Callable[[torch.Tensor, Any, GemmCall], torch.Tensor]  # x, the weight, the call
Norm = Callable[[torch.Tensor], torch.Tensor]


class LoraKernels:
    """What computes with adapters on a device: here torch, in float32, in which its products of single rows are fast on
    a CPU."""

    rank_multiple = 1  # of the ranks that factors are filled up to
    dtype = torch.float32  # of factors
    row_counts: tuple[int, ...] = ()  # each the smallest for which kernels are launched that fewer rows do not need

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
        """out [num_tokens, size of all outputs], changed in place; x [num_tokens, inputs]; slots int32 [num_tokens]."""
        add_lora(out, x, slots, factors)

    def expand(self, out: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
        """out as of `add`, of float32 hidden [num_tokens, ranks], which is A x; of rows without an adapter it is not
        read."""
        add_expanded(out, hidden, slots, factors)

    def linear(
        self,
        multiply: Multiply,
        weight: object,
        x: torch.Tensor,
        slots: torch.Tensor,
        factors: LoraFactors,
        call: GemmCall,
        norm: Norm | None = None,
    ) -> torch.Tensor:
        """What `multiply` makes of x, the weight and the call, with what the slots' adapters add before the activation.
        norm: the call's, as a function."""
        x = x if norm is None else norm(x)
        out = multiply(x, weight, GemmCall(bias=call.bias, residual=call.residual))
        self.add(out, x, slots, factors)
        return out if call.activation is None else torch_ops.activate_mul(out, call.activation)


def add_lora(out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
    """out += B(A x) of each token's slot. Each token is a product of its own, so that what is added to it does not
    depend on the others."""
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero().flatten()
            _expand(out, tokens, _times(x[tokens].to(factors.a.dtype), factors.a[slot - 1]), slot, factors)


def add_expanded(out: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
    """out += B hidden of each token's slot; hidden [num_tokens, ranks]."""
    for slot in slots.unique().tolist():
        if slot:
            tokens = (slots == slot).nonzero().flatten()
            _expand(out, tokens, hidden[tokens].to(factors.b.dtype), slot, factors)


def _expand(out: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor, slot: int, factors: LoraFactors) -> None:
    """Adds to these tokens of out what the slot's B makes of their hidden [tokens, ranks]."""
    start, parts = 0, []
    for ranks, end in zip(hidden.split(factors.rank, dim=1), factors.ends, strict=True):
        parts.append(_times(ranks, factors.b[slot - 1, start:end]))
        start = end
    added = out[tokens].to(parts[0].dtype) + torch.cat(parts, dim=1)
    out[tokens] = added.to(out.dtype)


def _times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, inputs] @ weight.T, in a batch of single rows: their sums' order is that of one row."""
    return torch.bmm(x.unsqueeze(1), weight.T.expand(len(x), -1, -1)).squeeze(1)
