"""What adapters add to the outputs of a linear layer, in the Triton language.

`_shrink_kernel` computes A x, in parts of the inputs, and `_expand_kernel` adds B times their sum (Punica's SGMV; Chen
et al., 2023). A program has a tile of rows, and loops over the slots in it. What it adds to a row hangs on nothing but
that row and its slot: a tile has always as many rows, parts begin where the layer's size says, and are added in order,
by one program or by the next kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.lora.reference import LoraFactors

RANK_MULTIPLE = 16  # the least that a tensor core multiplies
TILE_ROWS = 16
_PART_INPUTS, _MOST_PARTS = 512, 16
# Rows from which tiles are enough programs: one then adds up all parts of its rows.
MANY_ROWS = 512


def add_lora_gpu(out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
    """`reference.add_lora`; rows of out and x may be strided, and x is in the factors' number format."""
    num_rows, size_in = x.shape
    rank, all_ranks = factors.rank, factors.a.shape[1]
    num_parts = min(_MOST_PARTS, next_power_of_2(max(size_in // _PART_INPUTS, 1)))
    inside = num_parts if num_rows >= MANY_ROWS else 1
    stored, tiles = num_parts // inside, cdiv(num_rows, TILE_ROWS)
    hidden = torch.empty(stored, num_rows, all_ranks, dtype=torch.float32, device=x.device)
    rank_block = next(size for size in (64, 32, 16) if rank % size == 0)
    precise = "ieee" if x.dtype == torch.float32 else "tf32"
    _shrink_kernel[(tiles, stored, all_ranks // rank_block)](
        x, factors.a, slots, hidden, num_rows, x.stride(0), factors.a.stride(0),
        SIZE_IN=size_in, ALL_RANKS=all_ranks, PART=cdiv(cdiv(size_in, num_parts), 64) * 64, INSIDE=inside,
        ROWS=TILE_ROWS, RANK_BLOCK=rank_block, TILE_IN=64, PRECISION=precise, num_warps=4,
    )  # fmt: skip
    tile_out = factors.tile_out
    _expand_kernel[(tiles, len(factors.tiles))](
        hidden, factors.b, slots, out, factors.tiles, num_rows, out.stride(0), factors.b.stride(0),
        ALL_RANKS=all_ranks, RANK=rank, PARTS=stored,
        ROWS=TILE_ROWS, RANK_BLOCK=rank_block, TILE_OUT=tile_out, PRECISION=precise, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, hidden_ptr, num_rows, x_stride, a_stride,
    SIZE_IN: tl.constexpr, ALL_RANKS: tl.constexpr, PART: tl.constexpr, INSIDE: tl.constexpr,
    ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, TILE_IN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden [parts, num_rows, ALL_RANKS] = A x of parts of the inputs; INSIDE of them are added up by a program."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part, rank = tl.program_id(1), tl.program_id(2) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
    slots = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0)
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
        tl.store(hidden_ptr + address, total, mask=mine[:, None])
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(
    hidden_ptr, b_ptr, slots_ptr, out_ptr, tiles_ptr, num_rows, out_stride, b_stride,
    ALL_RANKS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, TILE_OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out += B (sum of hidden's parts), in float32. tiles: see `LoraFactors`."""
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
            hidden = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
            for part in range(PARTS):
                address = (part * num_rows + rows)[:, None] * ALL_RANKS + (ranks + rank)[None, :]
                hidden += tl.load(hidden_ptr + address, mask=mine[:, None], other=0.0)
            b_rows = b_ptr + (slot - 1).to(tl.int64) * b_stride + outputs[None, :] * RANK
            b = tl.load(b_rows + rank[:, None], mask=(outputs < end)[None, :], other=0.0)
            acc = tl.dot(hidden, b.to(tl.float32), acc, input_precision=PRECISION)
        out = out_ptr + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
        ok = mine[:, None] & (outputs < end)[None, :]
        sum = tl.load(out, mask=ok, other=0.0).to(tl.float32) + acc
        tl.store(out, sum.to(out_ptr.dtype.element_ty), mask=ok)
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, axis=0)
