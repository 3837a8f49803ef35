"""GEMMs of some tens of rows with 4-bit weights by Marlin (Frantar et al. 2024, arXiv:2408.11743), of vLLM's library.

Marlin has a layout of its own: tiles of 16 inputs by 64 outputs, in the order in which a warp takes them as operands. A
weight that it multiplies with is there twice (`SecondLayout`), since this project's kernels are faster for few rows
and, with cuBLAS, for many. Scales and zero points of the 64 outputs of a tile are permuted likewise.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from minisgl_backend.kernels.linear import marlin_library
from minisgl_backend.kernels.linear.int4_torch import Int4Weight, dequantize, num_groups, pack, plane_size, unpack

log = logging.getLogger(__name__)

LAYOUT = "marlin"  # as a `LinearKey.second_layout`
GROUPS = (32, 64, 128)  # inputs with one scale, that its kernels have
TILE_IN, TILE_OUT = 128, 64  # sizes of weights are multiples of these
DTYPES = (torch.float16, torch.bfloat16)
_IN_WORD = 8
_AT_ONCE = 1 << 25  # numbers that are repacked: a byte each, and a few more on the way
# vLLM's numbers of number formats: bits of the mantissa << 8 | bias << 17 | IEEE's kinds of infinities << 50.
_UINT4 = 4 << 8 | 1 << 50
_UINT4_LESS_8 = _UINT4 | 8 << 17
_MOST_ERROR = 0.02  # of the trial, relative: rounding to bfloat16 gives 0.002


def marlin_group(weight: Int4Weight) -> int:
    """Inputs with one scale in Marlin's layout, where larger groups are cut."""
    return math.gcd(weight.group, GROUPS[-1])


def fits_marlin(weight: Int4Weight) -> bool:
    """Whether its kernels take such weights. Of one group its scales would have another order."""
    return (
        weight.words.dim() == 2
        and weight.size_out % TILE_OUT == 0
        and weight.size_in % TILE_IN == 0
        and weight.size_in > GROUPS[-1]
        and marlin_group(weight) in GROUPS
        and weight.scales.dtype in DTYPES
    )


def marlin_bytes(weight: Int4Weight) -> int:
    """Of a weight's copy in Marlin's layout."""
    numbers = weight.size_out * weight.size_in
    of_groups = numbers // marlin_group(weight)
    return numbers // 2 + of_groups * weight.scales.element_size() + (0 if weight.zeros is None else of_groups // 2)


@dataclass(frozen=True, kw_only=True)
class MarlinWeight:
    words: torch.Tensor  # int32 [size_in / 16, 2 * size_out]
    scales: torch.Tensor  # [groups, size_out], in Marlin's order
    zeros: torch.Tensor | None  # int32 [groups, size_out / 8], likewise
    size_out: int
    size_in: int
    marlin: Marlin = field(repr=False)
    layout: str = LAYOUT

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, size_in] @ weight.T"""
        return self.marlin.linear(x, self)


class Marlin:
    """Of one device. Its kernels follow one another, as they share what they wait on each other by."""

    def __init__(self, operators: Any, device: torch.device) -> None:
        """operators: see `marlin_library.operators`."""
        self._operators = operators
        is_gpu = device.type == "cuda"
        count = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
        self._locks = torch.zeros(count, dtype=torch.int32, device=device)
        self._no_order = torch.empty(0, dtype=torch.int32, device=device)

    def repack(self, weight: Int4Weight) -> MarlinWeight | None:
        """The weight in Marlin's layout; None: it does not hold it. Synchronises with the device."""
        if not fits_marlin(weight) or (weight.zeros is not None and int(weight.zeros.max()) > 15):
            return None  # a zero point of 16 is one that GPTQ's first version stores as 15
        size_out, size_in, group = weight.size_out, weight.size_in, marlin_group(weight)
        words = self._operators.gptq_marlin_repack(
            words_along_inputs(weight), self._no_order, size_in, size_out, 4, False
        )
        scales = _of_groups(weight.scales, weight, group)
        return MarlinWeight(
            words=words,
            scales=_tile_order(scales),
            zeros=None if weight.zeros is None else packed_zeros(_of_groups(weight.zeros, weight, group)),
            size_out=size_out,
            size_in=size_in,
            marlin=self,
        )

    def linear(self, x: torch.Tensor, weight: MarlinWeight) -> torch.Tensor:
        """x [rows, size_in] @ weight.T; partial sums are added in float32, in an order that is always the same."""
        kind = _UINT4_LESS_8 if weight.zeros is None else _UINT4
        out: torch.Tensor = self._operators.marlin_gemm(
            x.contiguous(), None, weight.words, None, weight.scales, None, None, weight.zeros, None, None, self._locks,
            kind, len(x), weight.size_out, weight.size_in, True, False, True, False,
        )  # fmt: skip
        return out


@cache
def open_marlin(device: torch.device, dtype: torch.dtype, has_zeros: bool) -> Marlin | None:
    """For weights with scales in dtype, once it has answered right; None: there is none, and why was said."""
    operators = marlin_library.operators()
    if operators is None:
        return None
    if dtype == torch.float16:
        log.info("trying Marlin in float16, which a GPU newer than its machine code compiles first: up to a minute")
    marlin = Marlin(operators, device)
    try:
        error = trial_error(marlin, device, dtype, has_zeros)
    except Exception as failure:
        refusal = f"its first call fails: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    else:
        if error <= _MOST_ERROR:
            return marlin
        refusal = f"its first call is wrong by {error:.3f}"
    log.warning("Marlin of vllm is left alone, since %s; %s", refusal, marlin_library.REMEDY)
    return None


def trial_error(marlin: Marlin, device: torch.device, dtype: torch.dtype, has_zeros: bool) -> float:
    """Of one GEMM, relative."""
    rows, size_out, size_in, group = 24, 2 * TILE_OUT, 2 * TILE_IN, GROUPS[0]
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator)

    plane = plane_size(size_in, group)
    shape = num_groups(size_in, group, plane), size_out
    weight = Int4Weight(
        words=pack(integers(size_out, size_in), plane).to(device),
        scales=(torch.rand(shape, generator=generator) + 0.5).to(device, dtype),
        zeros=integers(*shape).to(device) if has_zeros else None,
        size_in=size_in,
        group=group,
        plane=plane,
    )
    repacked = marlin.repack(weight)
    if repacked is None:
        raise RuntimeError("no layout for the trial's weight")
    x = torch.randn(rows, size_in, generator=generator).to(device, dtype)
    expected = x.float() @ dequantize(weight, torch.float32).t()
    found = repacked.linear(x).float()
    return float((found - expected).norm() / expected.norm())


def words_along_inputs(weight: Int4Weight) -> torch.Tensor:
    """int32 [size_in / 8, size_out]: number i of eight in bits 4 i, as GPTQ's files have them."""
    words = weight.words.new_empty((weight.size_in // _IN_WORD, weight.size_out))
    step = max(1, _AT_ONCE // weight.size_in)
    for start in range(0, weight.size_out, step):
        numbers = unpack(weight.words[start : start + step], weight.size_in, weight.plane)
        words[:, start : start + step] = _packed(numbers).t()
    return words


def packed_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """uint8 [groups, size_out] -> int32 [groups, size_out / 8], as Marlin reads them: of eight the even ones first."""
    eights = _tile_order(zeros).unflatten(-1, (-1, _IN_WORD // 2, 2)).transpose(-1, -2)
    return _packed(eights.flatten(-3))


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], 0 to 15 -> int32 [..., n / 8]: number i of eight in bits 4 i."""
    eights = numbers.contiguous().view(torch.int64)
    eights = (eights | eights >> 4) & 0x00FF00FF00FF00FF
    eights = (eights | eights >> 8) & 0x0000FFFF0000FFFF
    return (eights | eights >> 16).view(torch.int32)[..., ::2].contiguous()


def _of_groups(values: torch.Tensor, weight: Int4Weight, group: int) -> torch.Tensor:
    """[groups, size_out], of the weight's groups -> those of `group` inputs."""
    return values.repeat_interleave(weight.group // group, 0)[: weight.size_in // group]


def _tile_order(of_outputs: torch.Tensor) -> torch.Tensor:
    """[..., size_out] -> Marlin's order: outputs 8 i + j of 64 at j * 8 + i, since a thread has those 8 apart."""
    return of_outputs.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3).contiguous()
