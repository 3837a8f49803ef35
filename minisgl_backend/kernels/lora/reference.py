"""What adapters add to the outputs of a linear layer, in torch; and the factors that every implementation takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

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
    tile_out: int = 64

    @classmethod
    def within(cls, memory: torch.Tensor, layout: LoraLayout) -> LoraFactors:
        """memory: [num_slots, layout.size]; rows may be apart."""
        rank, ends, tiles = layout.rank, tuple(accumulate(layout.sizes)), []
        for output, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            tiles += [(row, min(row + cls.tile_out, end), output) for row in range(start, end, cls.tile_out)]
        ranks = len(layout.sizes) * rank
        of_a = ranks * layout.size_in
        return cls(
            a=memory[:, :of_a].unflatten(1, (ranks, layout.size_in)),
            b=memory[:, of_a : of_a + ends[-1] * rank].unflatten(1, (ends[-1], rank)),
            ends=ends,
            rank=rank,
            tiles=torch.tensor(tiles, dtype=torch.int32, device=memory.device),
        )

    def fill(self, index: int, output: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """One output's factors in a slot of zeros, by its index: a [its rank, inputs], b [its size, its rank]."""
        rank, first, start = len(a), output * self.rank, self.ends[output - 1] if output else 0
        self.a[index, first : first + rank] = a.to(self.a.dtype)
        self.b[index, start : self.ends[output], :rank] = b.to(self.b.dtype)


# out [num_tokens, size of all outputs], changed in place; x [num_tokens, inputs]; slots int32 [num_tokens]
LoraAdd = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LoraFactors], None]


def add_lora(out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
    """out += B(A x) of each token's slot. Each token is a product of its own, so that what is added to it does not
    depend on the others."""
    for slot in slots.unique().tolist():
        if not slot:
            continue
        tokens = (slots == slot).nonzero().flatten()
        hidden = _times(x[tokens].to(factors.a.dtype), factors.a[slot - 1])
        start, parts = 0, []
        for ranks, end in zip(hidden.split(factors.rank, dim=1), factors.ends, strict=True):
            parts.append(_times(ranks, factors.b[slot - 1, start:end]))
            start = end
        added = out[tokens].to(parts[0].dtype) + torch.cat(parts, dim=1)
        out[tokens] = added.to(out.dtype)


def _times(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, inputs] @ weight.T, in a batch of single rows: their sums' order is that of one row."""
    return torch.bmm(x.unsqueeze(1), weight.T.expand(len(x), -1, -1)).squeeze(1)
