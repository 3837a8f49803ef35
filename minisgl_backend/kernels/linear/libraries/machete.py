"""GEMMs with 4-bit weights by Machete, from vLLM's library: on Hopper, whose tensor cores it feeds from registers.

Described by Neural Magic, "Introducing Machete, a mixed-input GEMM kernel optimized for NVIDIA Hopper GPUs" (2024). Its
operator makes its weight layout of tiles of 64 inputs by 128 outputs. Scales are as in this project; zero points are
added after scaling: -scale * zero point, rounded to the dtype of x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.libraries.machete_tiles import TILES, kernel_of
from minisgl_backend.kernels.linear.libraries.repack import DTYPES, cut_group, kind, of_groups, words_by_output

LAYOUT = "machete"  # as a `LinearKey.repacked`
GROUPS = (64, 128)  # inputs with one scale that its kernels support
TILE_IN, TILE_OUT = 64, 128  # weight sizes are multiples of these

# Its schedules by kernel of the table. A cluster has two tiles (one for tiles of 16 rows, which were slower).
SCHEDULES: Mapping[str, str] = MappingProxyType(
    {kernel_of(tile): f"{tile}_2x1x1_TmaMI__TmaCoop_streamK" for tile in TILES}
)


def fits_machete(weight: Int4Weight) -> bool:
    """Whether its kernels support a weight like this one."""
    return (
        weight.words.dim() == 2
        and weight.size_out % TILE_OUT == 0
        and weight.size_in % TILE_IN == 0
        and weight.size_in % cut_group(weight) == 0
        and cut_group(weight) in GROUPS
        and weight.scales.dtype in DTYPES
    )


def machete_bytes(weight: Int4Weight) -> int:
    """Bytes of a weight's copy in Machete's layout; scales are only copied where groups are split."""
    numbers = weight.size_out * weight.size_in
    copies = (cut_group(weight) != weight.group) + (weight.zeros is not None)
    return numbers // 2 + copies * numbers // cut_group(weight) * weight.scales.element_size()


@dataclass(frozen=True, kw_only=True)
class MacheteWeight:
    words: torch.Tensor  # int32 [size_in / 8, size_out], in Machete's order, by columns
    scales: torch.Tensor  # [groups, size_out]
    zeros: torch.Tensor | None  # likewise: -scale * zero point
    kind: int
    group: int
    operators: Any = field(repr=False)
    layout: str = LAYOUT
    kernels: tuple[str, ...] = tuple(SCHEDULES)

    def linear(self, x: torch.Tensor, kernel: str) -> torch.Tensor:
        """x [rows, size_in] @ weight.T; partial sums are added in float32 in a fixed order."""
        out: torch.Tensor = self.operators.machete_mm(
            x.contiguous(), self.words, self.kind, None, self.scales, self.zeros, self.group, None, None,
            SCHEDULES[kernel],
        )  # fmt: skip
        return out


class Machete:
    """Of one device."""

    def __init__(self, operators: Any, device: torch.device) -> None:
        """operators: see `vllm.operators`."""
        self._operators = operators

    def repack(self, weight: Int4Weight) -> MacheteWeight | None:
        """The weight in Machete's layout; None: its kernels do not support it."""
        if not fits_machete(weight):
            return None
        dtype, scales, zeros = weight.scales.dtype, of_groups(weight.scales, weight), None
        if weight.zeros is not None:
            zeros = -scales * of_groups(weight.zeros, weight).to(dtype)
        words = self._operators.machete_prepack_B(words_by_output(weight).t(), dtype, kind(weight), dtype)
        return MacheteWeight(
            words=words, scales=scales, zeros=zeros, kind=kind(weight), group=cut_group(weight),
            operators=self._operators,
        )  # fmt: skip
