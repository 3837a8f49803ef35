"""GEMMs of some tens to some hundreds of rows with 4-bit weights, in the Triton language.

All planes of a step become one operand of one product, so that the tensor cores have a whole step's work while the next
numbers become operands in registers; x is one tile in shared memory. Tiles are large, since every tile reads x from the
L2 cache; so that all multiprocessors are busy to the end, each program takes as many steps as the others, of one tile
and then of the next (stream-K: Osama et al. 2023). The program that arrives last at a tile adds its parts in order, so
that results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
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
from minisgl_backend.kernels.linear.gguf.numbers import plane_of_block
from minisgl_backend.kernels.linear.gguf.packed import BLOCK, PackedBlocks
from minisgl_backend.kernels.linear.gguf.packed import PLANE as BLOCK_PLANE
from minisgl_backend.kernels.linear.int4.few_rows import scales_of, uses_assembly, words_of
from minisgl_backend.kernels.linear.int4.planes import PAIR, packed_scale, packed_zero, plane_of
from minisgl_backend.kernels.linear.int4.reference import MIDDLE, PLANES, Int4Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST, stages_that_fit

SMALL, LARGE = 32 << 20, 64 << 20  # numbers of a weight


@dataclass(frozen=True)
class ManyShape:
    """Tiling of one GEMM.

    tile: outputs of a program, gate and up both counted. rows: of a program. count: planes of one product.
    programs: per multiprocessor. least: steps of a program, at least.
    """

    tile: int
    rows: int
    num_warps: int
    num_stages: int
    count: int = 4
    programs: int = 1
    least: int = 4


def many_shape(rows: int, numbers: int, eight: bool = False, shared: int = LARGEST) -> ManyShape:
    """The best on an H200 for Qwen3-14B's weights, by how many numbers a weight has, and whether they have 8 bits. With
    less `shared` memory tiles are smaller."""
    large = numbers >= LARGE and shared >= LARGEST
    if rows <= 8:
        if eight:
            found = ManyShape(256, 8, 8, 3) if large else ManyShape(128, 8, 4, 3, programs=3)
        else:
            found = ManyShape(64, 8, 2, 3, programs=6) if numbers >= SMALL else ManyShape(256, 8, 8, 3)
    elif rows <= 32:
        found = ManyShape(128, 16 if rows <= 16 else 32, 4, 3, 2, programs=2)
    elif rows <= 64:
        found = ManyShape(256, 64, 8, 3, 2) if large and not eight else ManyShape(128, 64, 8 if eight else 4, 3, 2)
    else:
        found = ManyShape(256 if large and not eight else 128, 128, 8, 2, 2)
    # Words, x, and fields; some 8-bit weights become operands by way of shared memory.
    stage = BLOCK * (found.tile * (2 if eight else 1) // 2 + 2 * found.rows) + 4 * PLANES * found.tile
    through = 2 * found.count * BLOCK_PLANE * found.tile if eight else 0
    return replace(found, num_stages=stages_that_fit(found.num_stages, stage, shared - through))


def run(device: GemmDevice, x: torch.Tensor, weight: Int4Weight | PackedBlocks, call: GemmCall) -> torch.Tensor:
    if call.norm_weight is not None:
        x = device.ops.rms_norm(x, call.norm_weight, call.eps)
    kind, eight, facts = weight.kind, isinstance(weight, PackedBlocks) and weight.low is not None, device.facts
    shape = many_shape(len(x), kind.size_out * kind.size_in, eight, facts.shared_memory)
    return linear(x, weight, device.workspace, call, shape, facts.multiprocessors, device.pdl(x))


def linear(
    x: torch.Tensor,
    weight: Int4Weight | PackedBlocks,
    workspace: LinearWorkspace,
    call: GemmCall,
    shape: ManyShape,
    multiprocessors: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """See `GemmCall`, without a norm; rows of x are contiguous. GGUF's blocks: x in bfloat16 or float32."""
    _, _, bias, residual, activation, *_ = call
    gated, (rows, size_in), width = activation is not None, x.shape, weight.kind.size_out
    size_out = width // 2 if gated else width
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    words = weight.words
    if isinstance(weight, PackedBlocks):
        groups, (low, scales, zeros) = (BLOCK_PLANE, BLOCK_PLANE), (weight.low, weight.fields, None)
        fields, stride = scales.shape[1], scales.stride(1)
    else:
        groups, (low, scales, zeros) = (weight.group, weight.plane), (None, weight.scales, weight.zeros)
        fields = stride = 0
    programs, constants = _launch(shape, rows, size_out, size_in, *groups, multiprocessors, gated, pdl)
    _many_kernel[(programs,)](
        x, words, words if low is None else low, scales, words if zeros is None else zeros,
        x if bias is None else bias, x if residual is None else residual, out, workspace.partial, workspace.counters,
        rows, x.stride(0), WORDS=words.shape[-1], ZEROS=zeros is not None, FIELDS=fields, FIELD_STRIDE=stride,
        EIGHT=low is not None, BIAS=bias is not None, RESIDUAL=residual is not None, ACTIVATION=activation,
        ASM=uses_assembly(x), **constants,
    )  # fmt: skip
    return out


@lru_cache(maxsize=REMEMBERED)
def _launch(
    shape: ManyShape, rows: int, size_out: int, size_in: int, group: int, plane: int, sms: int, gated: bool, pdl: bool
) -> tuple[int, dict[str, Any]]:
    """Programs and constants of a launch; computed once, since that takes as long as a small kernel."""
    tile = shape.tile // 2 if gated else shape.tile
    tiles = cdiv(size_out, tile) * cdiv(rows, shape.rows)
    steps = cdiv(size_in, PLANES * plane)
    programs = max(1, min(sms * shape.programs, tiles * steps // min(shape.least, steps)))
    constants = dict(
        SIZE_OUT=size_out, SIZE_IN=size_in, GROUP=group, PLANE=plane, TOGETHER=gcd(group // plane, PLANES),
        COUNT=shape.count, STEPS=steps, TILES_OUT=cdiv(size_out, tile), TILES=tiles, PROGRAMS=programs,
        ROWS=shape.rows, TILE_OUT=tile, GATED=gated, MIDDLE=MIDDLE, num_warps=shape.num_warps,
        num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return programs, constants


@triton.jit
def _joined(planes_of):
    """Two or four planes [outputs, words] -> [outputs, all words], one after the other."""
    outputs: tl.constexpr = planes_of[0].shape[0]
    words: tl.constexpr = planes_of[0].shape[1]
    if len(planes_of) == 2:
        return tl.reshape(tl.permute(tl.join(planes_of[0], planes_of[1]), (0, 2, 1)), (outputs, 2 * words))
    else:
        joined = tl.join(tl.join(planes_of[0], planes_of[2]), tl.join(planes_of[1], planes_of[3]))
        return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (outputs, 4 * words))


@triton.jit
def _together(scales, ZEROS: tl.constexpr, ASM: tl.constexpr):
    """Scales and zero points of a step, those of a group in one number, since they move between threads."""
    found: tl.tuple = ()
    for chunk in tl.static_range(len(scales)):
        scale, zero = scales[chunk]
        if ASM and ZEROS:
            both = scale.to(tl.uint16, bitcast=True).to(tl.int32) | (zero.to(tl.int32) << 16)
            found += ((both, both),)
        else:
            found += ((scale, zero),)
    return found


@triton.jit
def _operand(
    words, odd, scales, FIRST: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, TOGETHER: tl.constexpr,
    ZEROS: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """COUNT planes of a tile of words, from plane FIRST on, scaled: [outputs, COUNT * words]."""
    c = tl.broadcast_to(tl.arange(0, words.shape[1])[None, :], words.shape)
    found: tl.tuple = ()
    for plane in tl.static_range(FIRST, FIRST + COUNT):
        scale = tl.broadcast_to(scales[plane // TOGETHER][0][:, None], words.shape)
        zero = tl.broadcast_to(scales[plane // TOGETHER][1][:, None], words.shape)
        if ASM and ZEROS:
            zero = packed_zero(zero >> 16, DTYPE, ASM)
            scale = (scale & 0xFFFF) * PAIR
        else:
            scale = packed_scale(scale, ASM)
            if ZEROS:
                zero = packed_zero(zero, DTYPE, ASM)
            else:
                zero = packed_zero(tl.full(words.shape, MIDDLE, tl.int32), DTYPE, ASM)
        found += (plane_of(words, odd, c, zero, scale, plane, DTYPE, ASM),)
    return _joined(found)


@triton.jit
def _block_operand(
    words, low, fields, FIRST: tl.constexpr, COUNT: tl.constexpr, EIGHT: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """As `_operand`, of GGUF's blocks."""
    found: tl.tuple = ()
    for plane in tl.static_range(FIRST, FIRST + COUNT):
        found += (plane_of_block(words, low, fields, plane, EIGHT, DTYPE, ASM),)
    return _joined(found)


@triton.jit(do_not_specialize=["rows"])
def _many_kernel(
    x_ptr, words_ptr, low_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    rows, x_stride,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    TOGETHER: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr, TILES_OUT: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, ROWS: tl.constexpr, TILE_OUT: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr,
    FIELDS: tl.constexpr, FIELD_STRIDE: tl.constexpr, EIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """STEPS: of a tile, each of a block's words. FIELDS: 0, or those of GGUF's blocks, which are at scales_ptr."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    TILE: tl.constexpr = 2 * TILE_OUT if GATED else TILE_OUT
    WIDTH: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    j = tl.arange(0, TILE)
    c = tl.arange(0, PLANE)
    k = tl.arange(0, COUNT * PLANE)
    program = tl.program_id(0)
    at, stop = program * (TILES * STEPS) // PROGRAMS, (program + 1) * (TILES * STEPS) // PROGRAMS
    while at < stop:
        tile = at // STEPS
        first = at - tile * STEPS
        last = tl.minimum(STEPS, first + stop - at)
        # One GEMM for both halves: the first TILE_OUT are gate rows, the others the same up rows.
        column = tile % TILES_OUT * TILE_OUT + j % TILE_OUT
        column_ok = column < SIZE_OUT
        row = column + j // TILE_OUT * SIZE_OUT
        r = tile // TILES_OUT * ROWS + tl.arange(0, ROWS)
        r_ok = r < rows
        word_rows = words_ptr + row.to(tl.int64)[:, None] * WORDS
        low_rows = low_ptr + row.to(tl.int64)[:, None] * WORDS
        x_rows = x_ptr + r.to(tl.int64)[:, None] * x_stride
        acc = tl.zeros([TILE, ROWS], tl.float32)
        scales: tl.tuple = ()
        if FIELDS == 0:
            scales = scales_of(
                scales_ptr, zeros_ptr, row, column_ok, first * PLANE, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
            )
        for step in tl.range(first, last):
            words, odd = words_of(word_rows, c[None, :], column_ok[:, None], step * PLANE, ASM)
            tiles: tl.tuple = ()
            for part in tl.static_range(8 // COUNT):
                i = step * (8 * PLANE) + part * (COUNT * PLANE) + k
                ok = r_ok[:, None]
                if SIZE_IN % (8 * PLANE) != 0:
                    ok = ok & (i < SIZE_IN)[None, :]
                tiles += (tl.load(x_rows + i[None, :], mask=ok, other=0.0),)
            if FIELDS == 0:
                # The next step's scales are in flight while this one's are used.
                after_ok = column_ok & (j * 0 + step + 1 < last)
                following = scales_of(
                    scales_ptr, zeros_ptr, row, after_ok, (step + 1) * PLANE, WIDTH, GROUP, PLANE, TOGETHER, ZEROS
                )
                together = _together(scales, ZEROS, ASM)
                scales = following
                low = words, odd
            else:
                together = ()
                for one in tl.static_range(FIELDS):
                    at_field = (step * FIELDS + one) * FIELD_STRIDE
                    together += (tl.load(scales_ptr + at_field + row, mask=column_ok, other=0),)
                low = words, odd
                if EIGHT:
                    low = words_of(low_rows, c[None, :], column_ok[:, None], step * PLANE, ASM)
            for part in tl.static_range(8 // COUNT):
                if FIELDS == 0:
                    weights = _operand(
                        words, odd, together, part * COUNT, COUNT, DTYPE, TOGETHER, ZEROS, MIDDLE, ASM
                    )  # fmt: skip
                else:
                    weights = _block_operand(
                        (words, odd), low, together, part * COUNT, COUNT, EIGHT, DTYPE, ASM
                    )  # fmt: skip
                acc = tl.dot(weights, tl.trans(tiles[part]), acc, input_precision="ieee")
        at += last - first
        ends = last - first == STEPS
        if not ends:
            ends = _leave_part(acc, partial_ptr, counters_ptr, tile, program, TILES, STEPS, PROGRAMS)
            if ends:
                acc = _sum_of_parts(partial_ptr, counters_ptr, tile, TILES, STEPS, PROGRAMS, TILE, ROWS)
        if ends:
            if BIAS:
                acc += tl.load(bias_ptr + row, mask=column_ok, other=0.0).to(tl.float32)[:, None]
            o = tile % TILES_OUT * TILE_OUT + tl.arange(0, TILE_OUT)
            result = acc
            if GATED:
                result = gate_mul_rows(acc, ACTIVATION)
            address = r.to(tl.int64)[None, :] * SIZE_OUT + o[:, None]
            out_ok = r_ok[None, :] & (o < SIZE_OUT)[:, None]
            if RESIDUAL:
                result += tl.load(residual_ptr + address, mask=out_ok, other=0.0).to(tl.float32)
            tl.store(out_ptr + address, result.to(out_ptr.dtype.element_ty), mask=out_ok)


@triton.jit
def _program_of(step, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr):
    """That has a step, of all tiles' TOTAL: the last whose first step, program * TOTAL // PROGRAMS, is no later."""
    return ((step + 1) * PROGRAMS - 1) // TOTAL


@triton.jit
def _part(program, tile, STEPS: tl.constexpr, TOTAL: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where a program leaves its sums of a tile: it has parts of two tiles at most, its first and its last."""
    return program * 2 + (program * TOTAL // PROGRAMS // STEPS != tile).to(tl.int32)


@triton.jit
def _leave_part(
    acc, partial_ptr, counters_ptr, tile, program, TILES: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Whether this program is the last to arrive."""
    TILE: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    TOTAL: tl.constexpr = TILES * STEPS
    inside = tl.arange(0, TILE)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    slab = _part(program, tile, STEPS, TOTAL, PROGRAMS).to(tl.int64) * (TILE * ROWS)
    tl.store(partial_ptr + slab + inside, acc)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
    first = _program_of(tile * STEPS, TOTAL, PROGRAMS)
    return arrived == _program_of(tile * STEPS + STEPS - 1, TOTAL, PROGRAMS) - first


@triton.jit
def _sum_of_parts(
    partial_ptr, counters_ptr, tile, TILES: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum [TILE, ROWS] of a tile's parts in the order of their inputs; resets the tile's counter."""
    TOTAL: tl.constexpr = TILES * STEPS
    tl.store(counters_ptr + tile, 0)
    inside = tl.arange(0, TILE)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    first = _program_of(tile * STEPS, TOTAL, PROGRAMS)
    for program in tl.range(first, _program_of(tile * STEPS + STEPS - 1, TOTAL, PROGRAMS) + 1, num_stages=1):
        slab = _part(program, tile, STEPS, TOTAL, PROGRAMS).to(tl.int64) * (TILE * ROWS)
        acc += tl.load(partial_ptr + slab + inside, cache_modifier=".cg")
    return acc
