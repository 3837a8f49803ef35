"""What adapters add to the outputs of a linear layer, in torch; and the factors that every implementation takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True, kw_only=True)
class LoraFactors:
    """Of all slots, for the outputs of one weight of this rank. Slots count from 1; 0 stands for no adapter.

    Each output has a rank of its own range of `a`. Ranks below `rank` are filled up with zeros, and B has the scale.
    """

    a: torch.Tensor  # [num_slots, outputs * rank, inputs]
    b: torch.Tensor  # [num_slots, size of all outputs, rank]
    ends: tuple[int, ...]  # the end of each output among the rows of b
    rank: int
    # int32 [num_tiles, 3]: tiles of up to `tile_out` rows of b: the first one, the one behind it, and their output.
    tiles: torch.Tensor
    tile_out: int = 64

    @classmethod
    def empty(
        cls, num_slots: int, sizes: Sequence[int], size_in: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> LoraFactors:
        """Of no adapter yet. sizes: of the outputs."""
        ends, tiles = tuple(accumulate(sizes)), []
        for output, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            tiles += [(row, min(row + cls.tile_out, end), output) for row in range(start, end, cls.tile_out)]
        return cls(
            a=torch.zeros(num_slots, len(sizes) * rank, size_in, dtype=dtype, device=device),
            b=torch.zeros(num_slots, ends[-1], rank, dtype=dtype, device=device),
            ends=ends,
            rank=rank,
            tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes

    def clear(self, slot: int) -> None:
        """The slot adds nothing from now on."""
        self.a[slot - 1].zero_()
        self.b[slot - 1].zero_()

    def fill(self, slot: int, output: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """One output's factors, in a slot that was cleared: a [its rank, inputs], b [its size, its rank]."""
        rank, first, start = len(a), output * self.rank, self.ends[output - 1] if output else 0
        self.a[slot - 1, first : first + rank] = a.to(self.a.dtype)
        self.b[slot - 1, start : self.ends[output], :rank] = b.to(self.b.dtype)


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
