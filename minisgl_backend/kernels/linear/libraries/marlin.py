"""GEMMs of some tens of rows with 4-bit weights by Marlin (Frantar et al. 2024, arXiv:2408.11743), from vLLM's library.

Marlin's weight layout has tiles of 16 inputs by 64 outputs, in the order in which a warp takes them as operands. Its
weights are in memory twice (`Repacked`), since this project's kernels are faster for few rows and, with cuBLAS, for
many. Scales and zero points of the 64 outputs of a tile are permuted likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.libraries.repack import (
    DTYPES,
    LARGEST_GROUP,
    cut_group,
    in_words,
    kind,
    of_groups,
    words_by_output,
)

LAYOUT = "marlin"  # as a `LinearKey.repacked`, and the kernel of the table
GROUPS = (32, 64, 128)  # inputs with one scale that its kernels support
TILE_IN, TILE_OUT = 128, 64  # weight sizes are multiples of these


def fits_marlin(weight: Int4Weight) -> bool:
    """Whether its kernels support a weight like this one. With a single group its scales would have another order."""
    return (
        weight.words.dim() == 2
        and weight.size_out % TILE_OUT == 0
        and weight.size_in % TILE_IN == 0
        and weight.size_in > LARGEST_GROUP
        and cut_group(weight) in GROUPS
        and weight.scales.dtype in DTYPES
    )


def marlin_bytes(weight: Int4Weight) -> int:
    """Bytes of a weight's copy in Marlin's layout."""
    numbers = weight.size_out * weight.size_in
    groups = numbers // cut_group(weight)
    return numbers // 2 + groups * weight.scales.element_size() + (0 if weight.zeros is None else groups // 2)


@dataclass(frozen=True, kw_only=True)
class MarlinWeight:
    words: torch.Tensor  # int32 [size_in / 16, 2 * size_out]
    scales: torch.Tensor  # [groups, size_out], in Marlin's order
    zeros: torch.Tensor | None  # int32 [groups, size_out / 8], likewise
    kind: int
    size_out: int
    size_in: int
    marlin: Marlin = field(repr=False)
    layout: str = LAYOUT
    kernels: tuple[str, ...] = (LAYOUT,)

    def linear(self, x: torch.Tensor, kernel: str) -> torch.Tensor:
        """x [rows, size_in] @ weight.T"""
        return self.marlin.linear(x, self)


class Marlin:
    """Marlin on one device. Its kernels must not overlap, since they share a workspace of locks."""

    def __init__(self, operators: Any, device: torch.device) -> None:
        """operators: see `vllm.operators`."""
        self._operators = operators
        is_gpu = device.type == "cuda"
        count = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
        self._locks = torch.zeros(count, dtype=torch.int32, device=device)
        self._no_order = torch.empty(0, dtype=torch.int32, device=device)

    def repack(self, weight: Int4Weight) -> MarlinWeight | None:
        """The weight in Marlin's layout; None: it cannot represent it. Synchronises with the device."""
        if not fits_marlin(weight) or (weight.zeros is not None and int(weight.zeros.max()) > 15):
            return None  # a zero point of 16, which GPTQ's first version stores as 15
        words = self._operators.gptq_marlin_repack(
            words_by_output(weight).t().contiguous(), self._no_order, weight.size_in, weight.size_out, 4, False
        )
        return MarlinWeight(
            words=words,
            scales=_tile_order(of_groups(weight.scales, weight)),
            zeros=None if weight.zeros is None else packed_zeros(of_groups(weight.zeros, weight)),
            kind=kind(weight),
            size_out=weight.size_out,
            size_in=weight.size_in,
            marlin=self,
        )

    def linear(self, x: torch.Tensor, weight: MarlinWeight) -> torch.Tensor:
        """x [rows, size_in] @ weight.T; partial sums are added in float32 in a fixed order."""
        out: torch.Tensor = self._operators.marlin_gemm(
            x.contiguous(), None, weight.words, None, weight.scales, None, None, weight.zeros, None, None, self._locks,
            weight.kind, len(x), weight.size_out, weight.size_in, True, False, True, False,
        )  # fmt: skip
        return out


def packed_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [groups, size_out] -> int32 [groups, size_out / 8] in Marlin's order: the even ones of eight first."""
    eights = _tile_order(zeros).unflatten(-1, (-1, 4, 2)).transpose(-1, -2)
    return in_words(eights.flatten(-3))


def _tile_order(of_outputs: torch.Tensor) -> torch.Tensor:
    """[..., size_out] -> Marlin's order: output 8 i + j of 64 at 8 j + i, since a thread has every eighth output."""
    return of_outputs.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3).contiguous()
