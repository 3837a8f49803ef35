"""GEMMs with 4-bit weights on GPUs, in the Triton language: weights are dequantized to 16 bits in registers.

One kernel serves few and some tens of rows. A scale belongs to a group of inputs: with few rows the sums of a group are
scaled (one multiplication for each sum), with more rows the weights. Split-K and `pdl`: see small_rows.py, whose rules
hold. For many rows the weight is dequantized in parts that stay in the L2 cache, and cuBLAS computes the GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_rows
from minisgl_backend.kernels.candidate import REMEMBERED
from minisgl_backend.kernels.launch import cdiv, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.epilogue import leave_part, sum_of_parts
from minisgl_backend.kernels.linear.int4.planes import packed_scale, packed_zero, planes
from minisgl_backend.kernels.linear.int4.reference import MIDDLE, PLANES, Int4Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain.small_rows import LEAST_ROWS
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST


@dataclass(frozen=True)
class Int4Shape:
    """Tiling of one GEMM.

    tile_out: outputs of a program, after gating. rows: of a program. x_first: x is the left operand of the tensor
    core's GEMM, which has at least 16 rows; else the weight is, of which four warps take at least 64 rows with Hopper's
    instructions. scaled: weights are scaled, not sums. early: steps of weights loaded before the kernel waits for the
    previous one. step: words of an output per step, at most those of a plane; fewer need less shared memory.
    """

    tile_out: int
    rows: int
    split: int
    num_warps: int
    num_stages: int
    x_first: bool = False
    scaled: bool = False
    early: int = 0
    step: int = 32


@cache
def int4_shape(
    rows: int, size_out: int, size_in: int, gated: bool, num_sms: int = 132, shared: int = LARGEST
) -> Int4Shape:
    """size_out: after gating. shared: bytes of shared memory that a program may have."""
    cut = _measured(rows, size_out, gated)
    tile = cut.tile_out * 2 if gated else cut.tile_out
    programs, split = cdiv(size_out, cut.tile_out), 1
    while split < cut.split and programs * split < 6 * num_sms and size_in // (split * 2) >= 512:
        split *= 2
    num_stages = max(1, min(cut.num_stages, shared // stage_bytes(tile, cut.rows, cut.step)))
    return replace(cut, split=split, num_stages=num_stages)


def _measured(rows: int, size_out: int, gated: bool) -> Int4Shape:
    """The best on an H100 for Qwen3-14B's weights; `split` is an upper bound."""
    half = 2 if gated else 1
    split = 1 if gated else 8
    if rows <= 8:
        return Int4Shape(64 // half, LEAST_ROWS, split, 2, 4)
    if rows <= 16:
        return Int4Shape(64, 16, 1, 4, 4, x_first=True) if gated else Int4Shape(64, 16, 4, 2, 4)
    if rows <= 32:
        return Int4Shape(128 // half, 32, split, 4, 4, scaled=True, step=16)
    if gated:
        return Int4Shape(64, 64, 1, 4, 3, scaled=True)
    return Int4Shape(128, 64, 4 if rows <= 64 else 1, 4, 3, scaled=True, step=16)


def stage_bytes(tile: int, rows: int, step: int) -> int:
    """Bytes of shared memory of a step: `tile` outputs in 4 bits, and x in 16."""
    return PLANES * step * (tile // 2 + 2 * rows)


def run(device: GemmDevice, x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
    if call.norm_weight is not None:
        x = device.ops.rms_norm(x, call.norm_weight, call.eps)
    facts, gated = device.facts, call.activation is not None
    size_out = weight.kind.size_out // 2 if gated else weight.kind.size_out
    shape = int4_shape(len(x), size_out, weight.size_in, gated, facts.multiprocessors, facts.shared_memory)
    return linear(x, weight, device.workspace, call, shape, device.pdl(x))


def linear(
    x: torch.Tensor,
    weight: Int4Weight,
    workspace: LinearWorkspace,
    call: GemmCall,
    shape: Int4Shape,
    pdl: bool = False,
) -> torch.Tensor:
    """See `GemmCall`, without a norm; rows of x are contiguous."""
    _, _, bias, residual, activation, *_ = call
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = weight.kind.size_out // 2 if gated else weight.kind.size_out
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    grid, constants = _launch(shape, rows, size_out, size_in, weight.group, weight.plane, workspace.max_split, pdl)
    _linear_kernel[grid](
        x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros,
        x if bias is None else bias, x if residual is None else residual, out, workspace.partial, workspace.counters,
        rows, x.stride(0), WORDS=weight.words.shape[-1], ZEROS=weight.zeros is not None, BIAS=bias is not None,
        RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation, ASM=uses_assembly(x), **constants,
    )  # fmt: skip
    return out


@lru_cache(maxsize=REMEMBERED)
def _launch(
    shape: Int4Shape, rows: int, size_out: int, size_in: int, group: int, plane: int, max_split: int, pdl: bool
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and constants of a launch; computed once, since that takes as long as a small kernel."""
    step, block = min(shape.step, plane), PLANES * plane
    row_tiles = cdiv(rows, shape.rows)
    split = 1 if row_tiles > 1 else min(shape.split, max_split)
    part = cdiv(cdiv(size_in, split), block) * block
    split = cdiv(size_in, part)
    constants = dict(
        SIZE_OUT=size_out, SIZE_IN=size_in, GROUP=group, PLANE=plane, STEP=step, TOGETHER=gcd(group // plane, PLANES),
        PART=part // PLANES, SPLIT=split, ROWS=shape.rows, TILE_OUT=shape.tile_out, X_FIRST=shape.x_first,
        SCALED=shape.scaled, EARLY=min(shape.early, part // (PLANES * step)), MIDDLE=MIDDLE, num_warps=shape.num_warps,
        num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return (row_tiles, cdiv(size_out, shape.tile_out), split), constants


def planes_together(weight: Int4Weight) -> int:
    """How many planes of a block share a scale; a power of two."""
    return gcd(weight.group // weight.plane, PLANES)


def uses_assembly(x: torch.Tensor) -> bool:
    return x.is_cuda and x.element_size() == 2 and torch.version.cuda is not None


@triton.jit
def scales_of(
    scales_ptr, zeros_ptr, row, ok, at, SIZE_OUT, GROUP: tl.constexpr, PLANE: tl.constexpr, TOGETHER: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    """Scales and zero points [outputs] of the block with word `at` of an output, one for each TOGETHER planes."""
    first = at // PLANE * (8 * PLANE)
    found: tl.tuple = ()
    for chunk in tl.static_range(8 // TOGETHER):
        place = ((first + chunk * TOGETHER * PLANE) // GROUP) * SIZE_OUT + row
        scale = tl.load(scales_ptr + place, mask=ok, other=0.0)
        if ZEROS:
            found += ((scale, tl.load(zeros_ptr + place, mask=ok, other=0)),)
        else:
            found += ((scale, scale),)
    return found


@triton.jit
def step_product(
    acc, words, odd, scales, x_rows, r_ok, at, SIZE_IN: tl.constexpr, PLANE: tl.constexpr, STEP: tl.constexpr,
    TOGETHER: tl.constexpr, X_FIRST: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Accumulates the GEMM over STEP words of each output, from word `at` on."""
    c = tl.arange(0, STEP)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    c_tile = tl.broadcast_to(c[:, None] if X_FIRST else c[None, :], words.shape)
    if STEP == PLANE:
        first = at * 8
    else:
        first = tl.multiple_of(at // PLANE * (8 * PLANE) + at % PLANE, STEP)
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
def words_of(rows, c, ok, at, ASM: tl.constexpr):
    """Words `at` + c of the outputs that begin at `rows`, and their neighbours: see `planes`."""
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
    STEP: tl.constexpr, TOGETHER: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, X_FIRST: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr, ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PART: words of an output per program."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile, split = tl.program_id(1), tl.program_id(2)
    TILE: tl.constexpr = 2 * TILE_OUT if GATED else TILE_OUT
    WIDTH: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    # One GEMM for both halves: the first TILE_OUT are gate rows, the others the same up rows.
    j = tl.arange(0, TILE)
    column = tile * TILE_OUT + j % TILE_OUT
    column_ok = column < SIZE_OUT
    row = column + j // TILE_OUT * SIZE_OUT
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r_ok = r < rows
    c = tl.arange(0, STEP)
    word_rows = words_ptr + row.to(tl.int64) * WORDS
    if X_FIRST:
        word_rows, word_c, word_ok = word_rows[None, :], c[:, None], column_ok[None, :]
        acc = tl.zeros([ROWS, TILE], tl.float32)
    else:
        word_rows, word_c, word_ok = word_rows[:, None], c[None, :], column_ok[:, None]
        acc = tl.zeros([TILE, ROWS], tl.float32)
    x_rows = x_ptr + r.to(tl.int64)[:, None] * x_stride
    begin = split * PART
    end = tl.minimum(begin + PART, WORDS)
    early: tl.tuple = ()
    for step in tl.static_range(EARLY):
        at = begin + step * STEP
        words, odd = words_of(word_rows, word_c, word_ok & (word_c * 0 + at < end), at, ASM)
        ok = column_ok & (j * 0 + at < end)
        early += ((words, odd, scales_of(scales_ptr, zeros_ptr, row, ok, at, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)),)
    at = begin + EARLY * STEP
    scales = scales_of(
        scales_ptr, zeros_ptr, row, column_ok & (j * 0 + at < end), at, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
    )
    if PDL:
        tl_cuda.gdc_wait()
    for at in tl.range(begin + EARLY * STEP, end, STEP):
        words, odd = words_of(word_rows, word_c, word_ok, at, ASM)
        # The next step's scales are in flight while this one's are used.
        after = at + STEP
        after_ok = column_ok & (j * 0 + after < end)
        following = scales_of(scales_ptr, zeros_ptr, row, after_ok, after, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
        acc = step_product(
            acc, words, odd, scales, x_rows, r_ok, at, SIZE_IN, PLANE, STEP, TOGETHER, X_FIRST, SCALED, ZEROS, MIDDLE,
            ASM,
        )  # fmt: skip
        scales = following
    for step in tl.static_range(EARLY):
        acc = step_product(
            acc, early[step][0], early[step][1], early[step][2], x_rows, r_ok, begin + step * STEP, SIZE_IN, PLANE,
            STEP, TOGETHER, X_FIRST, SCALED, ZEROS, MIDDLE, ASM,
        )  # fmt: skip
    if X_FIRST:
        acc = tl.trans(acc)

    if SPLIT > 1:
        if leave_part(acc, partial_ptr, counters_ptr, tile, split, row, column_ok, WIDTH) != SPLIT - 1:
            return
        acc = sum_of_parts(partial_ptr, counters_ptr, tile, row, column_ok, SPLIT, WIDTH, TILE, ROWS)
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    if GATED:
        acc = gate_mul_rows(acc, ACTIVATION)
    address = r.to(tl.int64)[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & (o < SIZE_OUT)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
