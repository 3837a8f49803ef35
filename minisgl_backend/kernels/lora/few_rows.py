"""What adapters add to the outputs of a linear layer in a decode step, in the Triton language.

Up to sixteen rows of a slot are a group, which has programs of its own: slots are computed side by side, and each
factor is read once for sixteen rows. The rules of `pdl` are in plain/small_rows.py: slots and factors are written
before a chain of kernels begins, and are read before the wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, pdl_options
from minisgl_backend.kernels.lora.reference import LoraFactors
from minisgl_backend.kernels.lora.tiling import (
    FEW_ROWS,
    RANK_MULTIPLE,
    TILE_ROWS,
    parts_of,
    precision,
    rank_block,
    row_part,
)

_TILE_IN = 512  # bytes of a row's inputs that are multiplied at once


def shrink(
    x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors, counters: torch.Tensor, pdl: bool = False
) -> torch.Tensor:
    """A x of each row's slot, float32 [rows, all ranks]; of rows without an adapter nothing is written. counters:
    int32, zeros before and after."""
    num_rows, size_in = x.shape
    all_ranks, (part, num_parts) = factors.a.shape[1], parts_of(size_in)
    hidden = torch.empty(num_rows, all_ranks, dtype=torch.float32, device=x.device)
    partial = torch.empty(num_parts, num_rows, all_ranks, dtype=torch.float32, device=x.device)
    groups = _most_groups(num_rows, factors)
    _shrink_few_kernel[(groups, num_parts, all_ranks // RANK_MULTIPLE)](
        x, factors.a, slots, partial, hidden, counters, num_rows, x.stride(0), factors.a.stride(0),
        SIZE_IN=size_in, ALL_RANKS=all_ranks, PART=part, PARTS=num_parts, TILE_IN=_TILE_IN // x.dtype.itemsize,
        MOST=FEW_ROWS, ROWS=TILE_ROWS, RANK_BLOCK=RANK_MULTIPLE, PRECISION=precision(x),
        GROUPED=groups < num_rows, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return hidden


def shrink_row(
    x: torch.Tensor,
    slots: torch.Tensor,
    factors: LoraFactors,
    norm_weight: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`shrink` in parts of the inputs, which are to be added up, float32 [parts, rows, all ranks]; for a row or two.
    norm_weight: x is multiplied by it, and not yet divided by its root mean square."""
    num_rows, size_in = x.shape
    all_ranks, part = factors.a.shape[1], row_part(size_in)
    partial = torch.empty(cdiv(size_in, part), num_rows, all_ranks, dtype=torch.float32, device=x.device)
    _shrink_row_kernel[(num_rows, len(partial), all_ranks // RANK_MULTIPLE)](
        x, factors.a, slots, x if norm_weight is None else norm_weight, partial, num_rows, x.stride(0),
        factors.a.stride(0), SIZE_IN=size_in, ALL_RANKS=all_ranks, PART=part, RANK_BLOCK=RANK_MULTIPLE,
        NORM=norm_weight is not None, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return partial


def expand(
    out: torch.Tensor,
    hidden: torch.Tensor,
    slots: torch.Tensor,
    factors: LoraFactors,
    activation: str | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """out plus B hidden, written to out. With an activation, out is gate and up, and the result activation(gate) * up,
    [rows, size / 2]."""
    num_rows, all_ranks = hidden.shape
    tiles, result = len(factors.tiles), out
    if activation is not None:
        tiles, result = tiles // 2, torch.empty_like(out[:, : out.shape[1] // 2])
    groups = _most_groups(num_rows, factors)
    _expand_few_kernel[(groups, tiles)](
        hidden, factors.b, slots, out, result, factors.tiles, num_rows, out.stride(0), result.stride(0),
        factors.b.stride(0), SIZE=factors.ends[0], ALL_RANKS=all_ranks, RANK=factors.rank, MOST=FEW_ROWS,
        ROWS=TILE_ROWS, RANK_BLOCK=rank_block(factors.rank), TILE_OUT=factors.tile_out, ACTIVATION=activation,
        PRECISION=precision(out), GROUPED=groups < num_rows, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    return result


def _most_groups(num_rows: int, factors: LoraFactors) -> int:
    """Each slot, and rows without one, may have a group that is not full."""
    return min(num_rows, num_rows // TILE_ROWS + len(factors.a) + 1)


@triton.jit
def _rows_of_group(slots_ptr, num_rows, MOST: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr):
    """The slot of this program's group, its rows, and which of these there are; the slot is -1 where it has none.

    A group begins with the first of each ROWS rows of a slot. GROUPED: programs are numbered as groups are, else as the
    rows that groups begin with, which is found sooner. MOST: rows of a step."""
    r, number = tl.arange(0, MOST), tl.program_id(0)
    slots = tl.load(slots_ptr + r, mask=r < num_rows, other=-1)
    if GROUPED:
        before = (slots[:, None] == slots[None, :]) & (r[None, :] < r[:, None])
        earlier = tl.sum(before.to(tl.int32), 1)
        begins = (earlier % ROWS == 0) & (slots >= 0)
        mine = begins & (tl.cumsum(begins.to(tl.int32), 0) == number + 1)
        slot = tl.max(tl.where(mine, slots, -1), 0)
        place = earlier - tl.max(tl.where(mine, earlier, 0), 0)
    else:
        slot = tl.max(tl.where(r == number, slots, -1), 0)
        same = (slots == slot).to(tl.int32)
        skipped = tl.sum(tl.where(r < number, same, 0), 0)
        place = tl.cumsum(same, 0) - 1 - skipped
    hit = (place[None, :] == tl.arange(0, ROWS)[:, None]) & (slots[None, :] == slot)
    if not GROUPED:
        slot = tl.where(skipped % ROWS == 0, slot, -1)
    return slot, tl.sum(tl.where(hit, r[None, :], 0), 1), tl.sum(hit.to(tl.int32), 1) > 0


@triton.jit
def sum_parts(
    partial_ptr, hidden_ptr, counters_ptr, counter, rows, ok, num_rows, rank,
    ALL_RANKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Called by each program that has stored its part: the last one adds all in order."""
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + counter, 1, sem="acq_rel") == PARTS - 1:
        tl.store(counters_ptr + counter, 0)
        at = rows[:, None] * ALL_RANKS + rank[None, :]
        total = tl.zeros([rows.shape[0], rank.shape[0]], tl.float32)
        for part in tl.static_range(PARTS):
            one = partial_ptr + part * num_rows * ALL_RANKS + at
            total += tl.load(one, mask=ok[:, None], other=0.0, cache_modifier=".cg")
        tl.store(hidden_ptr + at, total, mask=ok[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_few_kernel(
    x_ptr, a_ptr, slots_ptr, partial_ptr, hidden_ptr, counters_ptr, num_rows, x_stride, a_stride,
    SIZE_IN: tl.constexpr, ALL_RANKS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TILE_IN: tl.constexpr,
    MOST: tl.constexpr, ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    GROUPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
    slot, rows, mine = _rows_of_group(slots_ptr, num_rows, MOST, ROWS, GROUPED)
    part, rank = tl.program_id(1), tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    a_rows = a_ptr + (slot - 1).to(tl.int64) * a_stride + rank[None, :] * SIZE_IN
    inputs = tl.where(slot > 0, SIZE_IN, 0)
    tiles: tl.tuple = ()
    for start in tl.static_range(0, PART, TILE_IN):
        i = part * PART + start + tl.arange(0, TILE_IN)
        tiles += (tl.load(a_rows + i[:, None], mask=(i < inputs)[:, None], other=0.0),)
    if PDL:
        tl_cuda.gdc_wait()
    if slot > 0:
        total = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
        for step in tl.static_range(PART // TILE_IN):
            i = part * PART + step * TILE_IN + tl.arange(0, TILE_IN)
            ok = mine[:, None] & (i < SIZE_IN)[None, :]
            x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + i[None, :], mask=ok, other=0.0)
            total = tl.dot(x, tiles[step], total, input_precision=PRECISION)
        address = (part * num_rows + rows)[:, None] * ALL_RANKS + rank[None, :]
        if PARTS == 1:
            tl.store(hidden_ptr + address, total, mask=mine[:, None])
        else:
            tl.store(partial_ptr + address, total, mask=mine[:, None])
            counter = tl.program_id(0) * (ALL_RANKS // RANK_BLOCK) + tl.program_id(2)
            sum_parts(partial_ptr, hidden_ptr, counters_ptr, counter, rows, mine, num_rows, rank, ALL_RANKS, PARTS)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_row_kernel(
    x_ptr, a_ptr, slots_ptr, norm_ptr, partial_ptr, num_rows, x_stride, a_stride,
    SIZE_IN: tl.constexpr, ALL_RANKS: tl.constexpr, PART: tl.constexpr, RANK_BLOCK: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program multiplies a part of one row in registers."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row, part = tl.program_id(0), tl.program_id(1)
    rank = tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    slot = tl.load(slots_ptr + row)
    i = part * PART + tl.arange(0, PART)
    a_rows = a_ptr + (slot - 1).to(tl.int64) * a_stride + rank[:, None] * SIZE_IN
    a = tl.load(a_rows + i[None, :], mask=(i < tl.where(slot > 0, SIZE_IN, 0))[None, :], other=0.0)
    if NORM:
        weight = tl.load(norm_ptr + i, mask=i < SIZE_IN, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + row * x_stride + i, mask=i < SIZE_IN, other=0.0).to(tl.float32)
    if NORM:
        x = x * weight
    total = tl.sum(a.to(tl.float32) * x[None, :], 1)
    tl.store(partial_ptr + (part * num_rows + row) * ALL_RANKS + rank, total)


@triton.jit
def _added(
    hidden_ptr, b_rows, rows, mine, first_rank, ok, acc,
    ALL_RANKS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [rows, outputs] plus B hidden, of the rows that are `mine` and the outputs that are `ok`."""
    for first in tl.static_range(0, RANK, RANK_BLOCK):
        rank = first + tl.arange(0, RANK_BLOCK)
        address = rows[:, None] * ALL_RANKS + (first_rank + rank)[None, :]
        hidden = tl.load(hidden_ptr + address, mask=mine[:, None], other=0.0)
        b = tl.load(b_rows + rank[:, None], mask=ok[None, :], other=0.0)
        acc = tl.dot(hidden, b.to(tl.float32), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _expand_few_kernel(
    hidden_ptr, b_ptr, slots_ptr, out_ptr, result_ptr, tiles_ptr, num_rows, out_stride, result_stride, b_stride,
    SIZE: tl.constexpr, ALL_RANKS: tl.constexpr, RANK: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, TILE_OUT: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    GROUPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SIZE: of the first output, the gate where there is an activation."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    slot, rows, mine = _rows_of_group(slots_ptr, num_rows, MOST, ROWS, GROUPED)
    if PDL:
        tl_cuda.gdc_wait()
    GATED: tl.constexpr = ACTIVATION is not None
    if (slot > 0) | (GATED & (slot == 0)):  # rows without an adapter have an activation, too
        tile = tiles_ptr + tl.program_id(1) * 3
        outputs, end = tl.load(tile) + tl.arange(0, TILE_OUT), tl.load(tile + 1)
        first_rank = tl.load(tile + 2) * RANK
        at = mine[:, None] & (outputs < end)[None, :]
        # Of slot 0 there are no factors.
        held = mine & (rows < tl.where(slot > 0, num_rows, 0))
        ok = outputs < tl.where(slot > 0, end, 0)
        zeros = tl.zeros([ROWS, TILE_OUT], tl.float32)
        b_rows = b_ptr + (slot - 1).to(tl.int64) * b_stride + outputs[None, :] * RANK
        from_rows = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
        total = tl.load(from_rows, mask=at, other=0.0).to(tl.float32) + _added(
            hidden_ptr, b_rows, rows, held, first_rank, ok, zeros, ALL_RANKS, RANK, RANK_BLOCK, PRECISION
        )
        if GATED:
            up = tl.load(from_rows + SIZE, mask=at, other=0.0).to(tl.float32) + _added(
                hidden_ptr, b_rows + SIZE * RANK, rows, held, first_rank + RANK, ok, zeros,
                ALL_RANKS, RANK, RANK_BLOCK, PRECISION,
            )  # fmt: skip
            total = gate_mul(total, up, ACTIVATION)
        to_rows = result_ptr + rows.to(tl.int64)[:, None] * result_stride + outputs[None, :]
        tl.store(to_rows, total.to(result_ptr.dtype.element_ty), mask=at)
