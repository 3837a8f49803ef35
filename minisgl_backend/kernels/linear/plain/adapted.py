"""What adapters add to one or two rows of a plain weight, inside its GEMM: the shrunk input is there, and B has a few
numbers for each output."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import next_power_of_2
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import LARGEST_OUT
from minisgl_backend.kernels.linear.plain.tiling import MAX_VECTOR_ROWS, LinearShape, linear_shape
from minisgl_backend.kernels.lora.reference import LoraFactors

_RANKS = (16, 32, 64)  # whose numbers a program has in registers
# Sizes of a launch without adapters.
NO_ADAPTERS: Mapping[str, int] = MappingProxyType({"RANK": 0, "ALL_RANKS": 0, "RANK_PARTS": 0, "RANK_PARTS_PADDED": 0})


class Adapted(NamedTuple):
    """The shrunk input of a GEMM."""

    hidden: torch.Tensor  # float32 [parts, rows, all ranks]; see `lora.few_rows.shrink_row`
    slots: torch.Tensor  # int32 [rows]
    factors: LoraFactors

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        b = self.factors.b
        return self.hidden, b, self.slots, self.factors.first_ranks, b.stride(0)

    @property
    def sizes(self) -> Mapping[str, int]:
        parts, _, all_ranks = self.hidden.shape
        return {
            "RANK": self.factors.rank,
            "ALL_RANKS": all_ranks,
            "RANK_PARTS": parts,
            "RANK_PARTS_PADDED": next_power_of_2(parts),
        }


def no_adapters(x: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """In the arguments' places; none is read."""
    return x, x, x, x, 0


def adapted_shape(x: torch.Tensor, weight: torch.Tensor, call: GemmCall, factors: LoraFactors) -> LinearShape | None:
    """How `vector.vector_linear` computes this GEMM with adapters; None: it does not."""
    rows, size_in = x.shape
    if not 0 < rows <= MAX_VECTOR_ROWS or x.stride(1) != 1:
        return None
    size_out, gated = len(weight), call.activation is not None
    if (
        size_out > LARGEST_OUT
        or x.dtype.itemsize != 2
        or (gated and call.bias is not None)
        or factors.rank not in _RANKS
    ):
        return None
    shape = linear_shape(rows, size_out // 2 if gated else size_out, size_in, gated)
    whole_tiles = all(end % shape.tile_out == 0 for end in factors.ends)
    return shape if shape.vector and whole_tiles else None


@triton.jit
def _ranks(slots_ptr, row, RANK: tl.constexpr):
    """The row's slot, the ranks, and which of them its adapter has: all, or none where the row has no adapter."""
    slot = tl.load(slots_ptr + row)
    ranks = tl.arange(0, RANK)
    return slot, ranks, ranks < tl.where(slot > 0, RANK, 0)


@triton.jit
def factors_of_row(b_ptr, slots_ptr, row, o, o_ok, b_stride, RANK: tl.constexpr):
    """B of outputs o, [outputs, RANK], in the row's slot; zeros: it has none."""
    slot, ranks, ok = _ranks(slots_ptr, row, RANK)
    at = b_ptr + (slot - 1).to(tl.int64) * b_stride + o[:, None] * RANK + ranks[None, :]
    return tl.load(at, mask=o_ok[:, None] & ok[None, :], other=0.0)


@triton.jit
def parts_of_row(
    hidden_ptr, slots_ptr, first, row, rows, RANK: tl.constexpr, ALL_RANKS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):  # fmt: skip
    """Hidden [PARTS_PADDED, RANK] of a row, from the rank `first` on; loaded at once, and added up later."""
    _, ranks, ok = _ranks(slots_ptr, row, RANK)
    parts = tl.arange(0, PARTS_PADDED)
    at = hidden_ptr + (parts * rows + row)[:, None] * ALL_RANKS + (first + ranks)[None, :]
    return tl.load(at, mask=(parts < PARTS)[:, None] & ok[None, :], other=0.0)


@triton.jit
def added_by_adapter(parts, b):
    """B [outputs, RANK] times the sum of hidden's parts, [outputs]."""
    return tl.sum(tl.sum(parts, 0)[None, :] * b.to(tl.float32), 1)
