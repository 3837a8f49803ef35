"""Device functions for a tile of pairs of (token, expert): its pairs, its rows of an expert's weight, the GEMM, and the
store of the results.

Tiles are those of align.py, or a plan of few_tokens.py. Pairs are the rows of the tensor cores' GEMM, or, where they
are few, its columns (PAIRS_FIRST is false).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def pairs_of_tile(order_ptr, first_ptr, end_ptr, tile, PAIRS: tl.constexpr):
    """A tile of `align.Tiles`, all [PAIRS]: pairs, their positions in sorted order, and which of them are valid."""
    place = tl.load(first_ptr + tile) + tl.arange(0, PAIRS)
    ok = place < tl.load(end_ptr + tile)
    return tl.load(order_ptr + place, mask=ok, other=0), place, ok


@triton.jit
def rows_of_weight(expert, column, SIZE_OUT: tl.constexpr, TILE_OUT: tl.constexpr, GATED: tl.constexpr):
    """For TILE_OUT outputs of an expert from `column` on: the outputs [TILE_OUT], their rows of a weight
    [experts, SIZE_OUT, ...], and which rows are valid.

    GATED: rows of [experts, 2 * SIZE_OUT, ...], for one GEMM with both halves: TILE_OUT gate rows, then the same up
    rows.
    """
    o = column + tl.arange(0, TILE_OUT)
    if GATED:
        c = tl.arange(0, 2 * TILE_OUT)
        of_both = column + c % TILE_OUT
        ok = of_both < SIZE_OUT
        return o, expert * (2 * SIZE_OUT) + of_both + (c // TILE_OUT) * SIZE_OUT, ok
    else:
        ok = o < SIZE_OUT
        return o, expert * SIZE_OUT + o, ok


@triton.jit
def products(
    x_ptr, x_row, x_ok, x_stride, weight_ptr, scale_at, weight_row, row_ok,
    SIZE_IN: tl.constexpr, TILE_IN: tl.constexpr, SCALED: tl.constexpr, BLOCK_IN: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """x @ weight.T of rows of both, float32 [rows of x, rows of the weight]. SCALED: of FP8, which become numbers of
    x's format, with scales at `scale_at` (`scaled.scales_of`). WAIT: waits for the previous kernel once the addresses
    are known."""
    acc = tl.zeros([x_row.shape[0], weight_row.shape[0]], tl.float32)
    k = tl.arange(0, TILE_IN)
    x_rows = x_ptr + x_row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + weight_row[None, :] * SIZE_IN
    if WAIT:
        tl_cuda.gdc_wait()
    for start in tl.range(0, SIZE_IN, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        x = tl.load(x_rows + i[None, :], mask=x_ok[:, None] & i_ok[None, :], other=0.0)
        if BLOCK_IN:
            scale = tl.load(scale_at + start // BLOCK_IN, mask=row_ok, other=0.0)
        w = tl.load(weight_rows + i[:, None], mask=i_ok[:, None] & row_ok[None, :], other=0.0)
        if BLOCK_IN:
            acc += tl.dot(x, w.to(x.dtype), input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(x, w.to(x.dtype), acc, input_precision="ieee")
    if SCALED and BLOCK_IN == 0:
        acc *= tl.load(scale_at, mask=row_ok, other=0.0)[None, :]
    return acc


@triton.jit
def weighted(acc, pair_weight_ptr, pair, ok, PAIRS_FIRST: tl.constexpr):
    """acc times the weights of its pairs."""
    weight = tl.load(pair_weight_ptr + pair, mask=ok, other=0.0).to(tl.float32)
    return acc * (weight[:, None] if PAIRS_FIRST else weight[None, :])


@triton.jit
def store_pairs(acc, out_ptr, row, ok, o, SIZE_OUT: tl.constexpr, PAIRS_FIRST: tl.constexpr):
    """Stores outputs o of pairs to rows `row` of out [rows, SIZE_OUT]."""
    if PAIRS_FIRST:
        address = row.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
        mask = ok[:, None] & (o < SIZE_OUT)[None, :]
    else:
        address = row.to(tl.int64)[None, :] * SIZE_OUT + o[:, None]
        mask = ok[None, :] & (o < SIZE_OUT)[:, None]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=mask)
