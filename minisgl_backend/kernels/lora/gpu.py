"""What adapters add to the outputs of a linear layer on a GPU, in the Triton language.

A shrink computes A x, in parts of the inputs, and an expand adds B times their sum (Punica's SGMV; Chen et al., 2023).
What they add to a row hangs on nothing but that row and its slot: a tile has always as many rows, parts begin where the
layer's size says, and are added in order. Decode steps have kernels of their own (few_rows.py); for one or two rows of
plain weights the GEMM itself expands. The kernels here are those of prompts, whose tiles are mostly of one slot: a
program has a tile of rows, and loops over the slots in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.elementwise import activate_mul
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.plain.adapted import Adapted, adapted_shape
from minisgl_backend.kernels.linear.plain.tiling import MAX_VECTOR_ROWS
from minisgl_backend.kernels.linear.plain.vector import vector_linear
from minisgl_backend.kernels.lora import few_rows
from minisgl_backend.kernels.lora.few_rows import sum_parts
from minisgl_backend.kernels.lora.reference import LoraFactors, LoraKernels, Multiply, Norm
from minisgl_backend.kernels.lora.tiling import (
    FEW_ROWS,
    MANY_ROWS,
    RANK_MULTIPLE,
    TILE_ROWS,
    parts_of,
    precision,
    rank_block,
)

_COUNTERS = 1 << 16  # of sixteen rows times sixteen ranks, up to MANY_ROWS


class TritonLora(LoraKernels):
    """Of one device."""

    rank_multiple = RANK_MULTIPLE
    row_counts = (1, MAX_VECTOR_ROWS + 1, FEW_ROWS + 1, MANY_ROWS)

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """dtype: of the model."""
        self.dtype, self._facts = dtype, DeviceFacts.of(device)
        self._counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
        self.expand(out, _shrink(x, slots, factors, self._counters), slots, factors)

    def expand(self, out: torch.Tensor, hidden: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
        num_rows, all_ranks = hidden.shape
        if num_rows <= FEW_ROWS:
            few_rows.expand(out, hidden, slots, factors)
            return
        _expand_kernel[(cdiv(num_rows, TILE_ROWS), len(factors.tiles))](
            hidden, factors.b, slots, out, factors.tiles, num_rows, out.stride(0), factors.b.stride(0),
            ALL_RANKS=all_ranks, RANK=factors.rank, ROWS=TILE_ROWS, RANK_BLOCK=rank_block(factors.rank),
            TILE_OUT=factors.tile_out, PRECISION=precision(out), num_warps=4,
        )  # fmt: skip

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
        pdl = self._facts.dependent_launch and len(x) <= FEW_ROWS
        if isinstance(weight, torch.Tensor) and (shape := adapted_shape(x, weight, call, factors)) is not None:
            hidden = few_rows.shrink_row(x, slots, factors, call.norm_weight, pdl)
            return vector_linear(x, weight, call, shape, pdl, Adapted(hidden, slots, factors))
        x = x if norm is None else norm(x)
        bare = GemmCall(bias=call.bias, residual=call.residual)
        if len(x) > FEW_ROWS:
            out = multiply(x, weight, bare)
            self.add(out, x, slots, factors)
            return out if call.activation is None else activate_mul(out, call.activation)
        hidden = few_rows.shrink(x, slots, factors, self._counters, pdl)
        return few_rows.expand(multiply(x, weight, bare), hidden, slots, factors, call.activation, pdl)


def _shrink(x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors, counters: torch.Tensor) -> torch.Tensor:
    """As `few_rows.shrink`, for any number of rows, which may be strided; x is in the factors' number format."""
    num_rows, size_in = x.shape
    if num_rows <= FEW_ROWS:
        return few_rows.shrink(x, slots, factors, counters)
    all_ranks, block = factors.a.shape[1], rank_block(factors.rank)
    part, num_parts = parts_of(size_in)
    inside = num_parts if num_rows >= MANY_ROWS else 1
    stored = cdiv(num_parts, inside)
    hidden = torch.empty(num_rows, all_ranks, dtype=torch.float32, device=x.device)
    partial = hidden if stored == 1 else hidden.new_empty(stored, num_rows, all_ranks)
    _shrink_kernel[(cdiv(num_rows, TILE_ROWS), stored, all_ranks // block)](
        x, factors.a, slots, partial, hidden, counters, num_rows, x.stride(0), factors.a.stride(0),
        SIZE_IN=size_in, ALL_RANKS=all_ranks, PART=part, INSIDE=inside, PARTS=stored,
        ROWS=TILE_ROWS, RANK_BLOCK=block, TILE_IN=64, PRECISION=precision(x), num_warps=4,
    )  # fmt: skip
    return hidden


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, partial_ptr, hidden_ptr, counters_ptr, num_rows, x_stride, a_stride,
    SIZE_IN: tl.constexpr, ALL_RANKS: tl.constexpr, PART: tl.constexpr, INSIDE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, TILE_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden [num_rows, ALL_RANKS] = A x, in PARTS times INSIDE parts of the inputs; the latter are added up by a
    program, whose sum goes to partial [PARTS, num_rows, ALL_RANKS]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, rank = tl.program_id(1), tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
    has = slots > 0
    slot = tl.max(slots, axis=0)
    while slot > 0:
        mine = slots == slot
        a_rows = a_ptr + (slot - 1).to(tl.int64) * a_stride + rank[None, :] * SIZE_IN
        total = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
        for inside in range(INSIDE):
            first = (part * INSIDE + inside) * PART
            acc = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
            for start in range(0, PART, TILE_IN):
                i = first + start + tl.arange(0, TILE_IN)
                ok = (i < first + PART) & (i < SIZE_IN)
                x = tl.load(
                    x_ptr + rows.to(tl.int64)[:, None] * x_stride + i[None, :],
                    mask=mine[:, None] & ok[None, :],
                    other=0.0,
                )
                a = tl.load(a_rows + i[:, None], mask=ok[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision=PRECISION)
            total += acc
        address = (part * num_rows + rows)[:, None] * ALL_RANKS + rank[None, :]
        tl.store(partial_ptr + address, total, mask=mine[:, None])
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, axis=0)
    if PARTS > 1:
        counter = tl.program_id(0) * (ALL_RANKS // RANK_BLOCK) + tl.program_id(2)
        sum_parts(partial_ptr, hidden_ptr, counters_ptr, counter, rows, has, num_rows, rank, ALL_RANKS, PARTS)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    hidden_ptr, b_ptr, slots_ptr, out_ptr, tiles_ptr, num_rows, out_stride, b_stride,
    ALL_RANKS: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, TILE_OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out += B hidden, in float32. tiles: see `LoraFactors`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tiles_ptr + tl.program_id(1) * 3
    outputs, end = tl.load(tile) + tl.arange(0, TILE_OUT), tl.load(tile + 1)
    ranks = tl.load(tile + 2) * RANK
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
    slot = tl.max(slots, axis=0)
    while slot > 0:
        mine = slots == slot
        acc = tl.zeros([ROWS, TILE_OUT], tl.float32)
        for first in range(0, RANK, RANK_BLOCK):
            rank = first + tl.arange(0, RANK_BLOCK)
            address = rows[:, None] * ALL_RANKS + (ranks + rank)[None, :]
            hidden = tl.load(hidden_ptr + address, mask=mine[:, None], other=0.0)
            b_rows = b_ptr + (slot - 1).to(tl.int64) * b_stride + outputs[None, :] * RANK
            b = tl.load(b_rows + rank[:, None], mask=(outputs < end)[None, :], other=0.0)
            acc = tl.dot(hidden, b.to(tl.float32), acc, input_precision=PRECISION)
        out = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
        ok = mine[:, None] & (outputs < end)[None, :]
        sum = tl.load(out, mask=ok, other=0.0).to(tl.float32) + acc
        tl.store(out, sum.to(out_ptr.dtype.element_ty), mask=ok)
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, axis=0)
