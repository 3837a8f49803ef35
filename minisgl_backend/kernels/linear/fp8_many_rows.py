"""GEMMs of many rows with FP8 weights, in the Triton language: bound by the matrix units.

The products of each block of inputs are scaled and added in float32, which also keeps Hopper's matrix units precise:
they add products of FP8 numbers with 14 bits (DeepSeek-V3, section 3.3.2). Where rows begin at multiples of 16 bytes,
descriptors let one instruction of one thread bring a whole tile to shared memory (tensor memory access), and programs
stay and take one tile after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.shared_memory import LARGEST, stages_that_fit

_ALIGNMENT = 16  # bytes, of what descriptors read
_TOGETHER = 8  # tiles of rows that follow one another, so that a weight's tile comes from the L2 cache


@dataclass(frozen=True)
class ManyRowsShape:
    tile_rows: int
    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


def many_rows_shape(rows: int, block_in: int | None = None, shared: int = LARGEST) -> ManyRowsShape:
    tile_rows, tile_out, tile_in, warps = (128, 128, 128, 8) if rows > 64 else (64, 128, 128, 4)
    tile_in = tile_in if block_in is None else min(tile_in, block_in)
    return ManyRowsShape(
        tile_rows, tile_out, tile_in, warps, stages_that_fit(4, tile_in * (tile_rows + tile_out), shared)
    )


def linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    *,
    block: tuple[int, int] | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    shape: ManyRowsShape | None = None,
    descriptors: bool | None = None,
) -> torch.Tensor:
    """x [rows, size_in] and weight [size_out, size_in], both FP8 -> [rows, size_out] in `dtype`.

    x_scale [rows] and scale [size_out]; with a `block`, x_scale [rows, groups], whose columns are contiguous, and scale
    [blocks of outputs, blocks of inputs]. descriptors: whether to read by them; None: where that is possible.
    """
    (rows, size_in), size_out = x.shape, len(weight)
    facts = DeviceFacts.of(x.device)
    block_out, block_in = block or (0, 0)
    shape = shape or many_rows_shape(rows, block_in or None, facts.shared_memory)
    if descriptors is None:
        descriptors = facts.tensor_memory and size_in % _ALIGNMENT == 0
    out = torch.empty((rows, size_out), dtype=dtype, device=x.device)
    tasks = triton.cdiv(rows, shape.tile_rows) * triton.cdiv(size_out, shape.tile_out)
    operands = (
        (_descriptor(x, shape.tile_rows, shape.tile_in), _descriptor(weight, shape.tile_out, shape.tile_in))
        if descriptors
        else (x, weight)
    )
    _many_rows_kernel[(min(tasks, facts.multiprocessors or 2) if descriptors else tasks,)](
        *operands, x_scale, scale, out if bias is None else bias, out if residual is None else residual, out, rows,
        SIZE_OUT=size_out, SIZE_IN=size_in, TILE_ROWS=shape.tile_rows, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in,
        TOGETHER=_TOGETHER, BLOCK_OUT=block_out, BLOCK_IN=block_in, BIAS=bias is not None,
        RESIDUAL=residual is not None, DESCRIPTORS=descriptors, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip
    return out


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # which older Tritons do not have

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit(do_not_specialize=["rows"])
def _many_rows_kernel(
    x, weight, x_scale_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, rows,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """x and weight: descriptors, or pointers."""
    row_tiles = tl.cdiv(rows, TILE_ROWS)
    out_tiles: tl.constexpr = (SIZE_OUT + TILE_OUT - 1) // TILE_OUT
    for task in tl.range(tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        first = task // (TOGETHER * out_tiles) * TOGETHER
        some = tl.minimum(row_tiles - first, TOGETHER)
        row = (first + task % some) * TILE_ROWS
        column = (task % (TOGETHER * out_tiles)) // some * TILE_OUT
        acc = _tile(
            x, weight, x_scale_ptr, scale_ptr, rows, row, column, SIZE_OUT, SIZE_IN, TILE_ROWS, TILE_OUT, TILE_IN,
            BLOCK_OUT, BLOCK_IN, DESCRIPTORS,
        )  # fmt: skip
        r = row + tl.arange(0, TILE_ROWS)
        o = column + tl.arange(0, TILE_OUT)
        r_ok, o_ok = r < rows, o < SIZE_OUT
        if BLOCK_IN == 0:
            x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
            acc = acc * x_scale[:, None] * tl.load(scale_ptr + o, mask=o_ok, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[None, :]
        address = r.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
        ok = r_ok[:, None] & o_ok[None, :]
        if RESIDUAL:
            acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
        tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _tile(
    x, weight, x_scale_ptr, scale_ptr, rows, row, column,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[TILE_ROWS, TILE_OUT] in float32, without the scales of rows and outputs."""
    groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN if BLOCK_IN else 1
    one_block: tl.constexpr = BLOCK_OUT >= TILE_OUT and BLOCK_OUT % TILE_OUT == 0
    r = row + tl.arange(0, TILE_ROWS)
    o = column + tl.arange(0, TILE_OUT)
    r_ok, o_ok = r < rows, o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    acc = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    if BLOCK_IN:
        w_scales = scale_ptr + (column if one_block else o) // BLOCK_OUT * groups
        x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
        w_scale = tl.load(w_scales) if one_block else tl.load(w_scales, mask=o_ok, other=0.0)
    for start in range(0, SIZE_IN, TILE_IN):
        if DESCRIPTORS:
            a = x.load([row, start])
            w = weight.load([column, start])
        else:
            i_ok = start + k < SIZE_IN
            a = tl.load(x + r.to(tl.int64)[:, None] * SIZE_IN + start + k[None, :],
                        mask=r_ok[:, None] & i_ok[None, :], other=0.0)  # fmt: skip
            w = tl.load(weight + o.to(tl.int64)[:, None] * SIZE_IN + start + k[None, :],
                        mask=o_ok[:, None] & i_ok[None, :], other=0.0)  # fmt: skip
        product = tl.dot(a, w.T)
        if BLOCK_IN:
            if one_block:
                acc += product * (x_scale * w_scale)[:, None]
            else:
                acc += product * (x_scale[:, None] * w_scale[None, :])
            # Of the next block, while its tiles are on their way.
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN
            x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
            w_scale = tl.load(w_scales + g) if one_block else tl.load(w_scales + g, mask=o_ok, other=0.0)
        else:
            acc += product
    return acc
