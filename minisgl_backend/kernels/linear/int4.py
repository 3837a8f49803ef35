"""GEMMs with 4-bit weights on GPUs, in the Triton language: weights become 16-bit numbers in registers.

One kernel for few rows and for some. A scale belongs to a group of inputs, so sums of a group are scaled where there
are few rows (one multiplication for each sum), and weights themselves where there are more. Split sums, and `pdl`:
see small_rows.py, whose rules hold. Of many rows the weight is dequantized, as much of it at once as stays in the L2
cache, and multiplied by cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.int4_planes import packed_scale, packed_zero, planes
from minisgl_backend.kernels.linear.int4_torch import MIDDLE, PLANES, Int4Weight
from minisgl_backend.kernels.linear.small_rows import LEAST_ROWS, LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory


@dataclass(frozen=True)
class Int4Shape:
    """How one product is cut into programs.

    tile_out: outputs of a program, after gating. rows: of a program. x_first: x is the left operand of the tensor
    core's product, of 16 rows at least; else the weight is, of which four warps take 64 rows at least, with Hopper's
    instructions. scaled: weights are scaled, not sums. early: blocks of weights loaded before the kernel waits for the
    one before it.
    """

    tile_out: int
    rows: int
    split: int
    num_warps: int
    num_stages: int
    x_first: bool = False
    scaled: bool = False
    early: int = 0


@cache
def int4_shape(
    rows: int, size_out: int, size_in: int, gated: bool, num_sms: int = 132, shared: int = LARGEST
) -> Int4Shape:
    """size_out: after gating. shared: bytes of shared memory that a program may have."""
    if rows <= 16:
        tile, tile_rows, num_warps = 64, LEAST_ROWS if rows <= 8 else 16, 2
    else:
        tile, tile_rows, num_warps = 128, min(128, triton.next_power_of_2(rows)), 4
    tile_out = tile // 2 if gated else tile
    programs, split = triton.cdiv(size_out, tile_out), 1
    while rows <= 64 and programs * split < 3 * num_sms and split < 8 and size_in // (split * 2) >= 512:
        split *= 2
    num_stages = max(1, min(4, shared // stage_bytes(tile, tile_rows)))
    return Int4Shape(tile_out, tile_rows, split, num_warps, num_stages, scaled=rows > 32)


def stage_bytes(tile: int, rows: int) -> int:
    """Shared memory of a block of 256 inputs: of `tile` outputs in 4 bits, and of x in 16."""
    return 256 * (tile // 2 + 2 * rows)


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    workspace: LinearWorkspace,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    shape: Int4Shape | None = None,
    num_sms: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """epilogue(x @ weight.T): as `Int4Kernels.linear`, of x whose rows are contiguous, without the norm."""
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = weight.size_out // 2 if gated else weight.size_out
    shape = shape or int4_shape(rows, size_out, size_in, gated, num_sms, shared_memory(x.device))
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    block = PLANES * weight.plane
    row_tiles = triton.cdiv(rows, shape.rows)
    split = 1 if row_tiles > 1 else min(shape.split, workspace.max_split)
    part = triton.cdiv(triton.cdiv(size_in, split), block) * block
    split = triton.cdiv(size_in, part)
    _linear_kernel[(row_tiles, triton.cdiv(size_out, shape.tile_out), split)](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        x if bias is None else bias, x if residual is None else residual, out, workspace.partial, workspace.counters,
        rows, x.stride(0), SIZE_OUT=size_out, SIZE_IN=size_in, WORDS=weight.words.shape[-1], GROUP=weight.group,
        PLANE=weight.plane, TOGETHER=planes_together(weight), PART=part, SPLIT=split, ROWS=shape.rows,
        TILE_OUT=shape.tile_out, X_FIRST=shape.x_first, SCALED=shape.scaled, EARLY=min(shape.early, part // block),
        ZEROS=weight.zeros is not None, MIDDLE=MIDDLE, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATED=gated, ACTIVATION=activation, ASM=uses_assembly(x), num_warps=shape.num_warps,
        num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


def planes_together(weight: Int4Weight) -> int:
    """How many planes of a block have one scale; a power of two."""
    return gcd(weight.group // weight.plane, PLANES)


def uses_assembly(x: torch.Tensor) -> bool:
    return x.is_cuda and x.element_size() == 2 and torch.version.cuda is not None


@triton.jit
def scales_of(scales_ptr, zeros_ptr, row, ok, first, SIZE_OUT, GROUP: tl.constexpr, PLANE: tl.constexpr,
               TOGETHER: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Of the block that begins with input `first`: a scale and a zero point [outputs] for each TOGETHER planes."""
    found: tl.tuple = ()
    for chunk in tl.static_range(8 // TOGETHER):
        at = ((first + chunk * TOGETHER * PLANE) // GROUP) * SIZE_OUT + row
        scale = tl.load(scales_ptr + at, mask=ok, other=0.0)
        if ZEROS:
            found += ((scale, tl.load(zeros_ptr + at, mask=ok, other=0)),)
        else:
            found += ((scale, scale),)
    return found


@triton.jit
def block_product(
    acc, words, odd, scales, x_rows, r_ok, first, SIZE_IN: tl.constexpr, PLANE: tl.constexpr, TOGETHER: tl.constexpr,
    X_FIRST: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds the products with one block of weights."""
    c = tl.arange(0, PLANE)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    c_tile = tl.broadcast_to(c[:, None] if X_FIRST else c[None, :], words.shape)
    for chunk in tl.static_range(8 // TOGETHER):
        scale = scales[chunk][0]
        if ZEROS:
            zero = packed_zero(scales[chunk][1], DTYPE, ASM)
            zero = tl.broadcast_to(zero[None, :] if X_FIRST else zero[:, None], words.shape)
        else:
            zero = packed_zero(tl.full(words.shape, MIDDLE, tl.int32), DTYPE, ASM)
        of_weight = zero
        if SCALED:
            of_weight = packed_scale(scale, ASM)
            of_weight = tl.broadcast_to(of_weight[None, :] if X_FIRST else of_weight[:, None], words.shape)
        weights = planes(words, odd, c_tile, zero, of_weight, DTYPE, SCALED, ASM)
        part = acc
        if not SCALED:
            part = tl.zeros(acc.shape, tl.float32)
        for plane in tl.static_range(chunk * TOGETHER, (chunk + 1) * TOGETHER):
            i = first + plane * PLANE + c
            ok = r_ok[:, None]
            if SIZE_IN % (8 * PLANE) != 0:
                ok = ok & (i < SIZE_IN)[None, :]
            x = tl.load(x_rows + i[None, :], mask=ok, other=0.0)
            if X_FIRST:
                part = tl.dot(x, weights[plane], part, input_precision="ieee")
            else:
                part = tl.dot(weights[plane], tl.trans(x), part, input_precision="ieee")
        if SCALED:
            acc = part
        elif X_FIRST:
            acc += part * scale.to(tl.float32)[None, :]
        else:
            acc += part * scale.to(tl.float32)[:, None]
    return acc


@triton.jit
def words_of(rows, c, ok, first, PLANE: tl.constexpr, ASM: tl.constexpr):
    """The block of words behind input `first`, and those next to them: see `planes`."""
    at = first // 8
    if ASM:
        words = tl.load(rows + at + c, mask=ok, other=0)
        return words, words
    else:
        return tl.load(rows + at + c // 2 * 2, mask=ok, other=0), tl.load(rows + at + c // 2 * 2 + 1, mask=ok, other=0)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, rows,
    x_stride,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    TOGETHER: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    X_FIRST: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile, split = tl.program_id(1), tl.program_id(2)
    BLOCK: tl.constexpr = 8 * PLANE
    TILE: tl.constexpr = 2 * TILE_OUT if GATED else TILE_OUT
    WIDTH: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    # One product for both halves: the first TILE_OUT are gate rows, the others the same up rows.
    j = tl.arange(0, TILE)
    column = tile * TILE_OUT + j % TILE_OUT
    column_ok = column < SIZE_OUT
    row = column + j // TILE_OUT * SIZE_OUT
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r_ok = r < rows
    c = tl.arange(0, PLANE)
    word_rows = words_ptr + row.to(tl.int64) * WORDS
    if X_FIRST:
        word_rows, word_c, word_ok = word_rows[None, :], c[:, None], column_ok[None, :]
        acc = tl.zeros([ROWS, TILE], tl.float32)
    else:
        word_rows, word_c, word_ok = word_rows[:, None], c[None, :], column_ok[:, None]
        acc = tl.zeros([TILE, ROWS], tl.float32)
    x_rows = x_ptr + r.to(tl.int64)[:, None] * x_stride
    begin = split * PART
    end = tl.minimum(begin + PART, WORDS * 8)
    early: tl.tuple = ()
    for block in tl.static_range(EARLY):
        first = begin + block * BLOCK
        words, odd = words_of(word_rows, word_c, word_ok & (word_c * 0 + first < end), first, PLANE, ASM)
        scales = scales_of(
            scales_ptr, zeros_ptr, row, column_ok & (j * 0 + first < end), first, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
        )
        early += ((words, odd, scales),)
    first = begin + EARLY * BLOCK
    scales = scales_of(
        scales_ptr, zeros_ptr, row, column_ok & (j * 0 + first < end), first, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
    )
    if PDL:
        tl_cuda.gdc_wait()
    for first in tl.range(begin + EARLY * BLOCK, end, BLOCK):
        words, odd = words_of(word_rows, word_c, word_ok, first, PLANE, ASM)
        after = first + BLOCK
        # The next block's scales are on their way while this one's are used.
        following = scales_of(
            scales_ptr, zeros_ptr, row, column_ok & (j * 0 + after < end), after, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
        )
        acc = block_product(
            acc, words, odd, scales, x_rows, r_ok, first, SIZE_IN, PLANE, TOGETHER, X_FIRST, SCALED, ZEROS, MIDDLE, ASM
        )
        scales = following
    for block in tl.static_range(EARLY):
        acc = block_product(
            acc, early[block][0], early[block][1], early[block][2], x_rows, r_ok, begin + block * BLOCK, SIZE_IN,
            PLANE, TOGETHER, X_FIRST, SCALED, ZEROS, MIDDLE, ASM,
        )  # fmt: skip
    if X_FIRST:
        acc = tl.trans(acc)

    if SPLIT > 1:
        # The last program to arrive adds the parts in order.
        s = tl.arange(0, ROWS)
        slab = (split * WIDTH + row)[:, None] * ROWS + s[None, :]
        tl.store(partial_ptr + slab, acc, mask=column_ok[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE, ROWS], tl.float32)
        for other in tl.static_range(SPLIT):
            part_slab = (other * WIDTH + row)[:, None] * ROWS + s[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=column_ok[:, None], other=0.0, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, TILE_OUT, ROWS)), (1, 2, 0)))
        acc = gate_mul(gate, up, ACTIVATION)
    address = r.to(tl.int64)[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & (o < SIZE_OUT)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
