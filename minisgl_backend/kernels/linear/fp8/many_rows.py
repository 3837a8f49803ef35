"""GEMMs of many rows with FP8 weights, in the Triton language: compute-bound.

The partial sums of each block of inputs are scaled and added in float32, which also keeps Hopper's tensor cores
precise: they accumulate FP8 with 14 bits (DeepSeek-V3, section 3.3.2). On an H100, with 4,096 rows and Qwen3-14B's
weights, 880 to 930 TFLOPS; cuBLAS 1,280 to 1,320. Persistent programs with TMA descriptors were slower.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.epilogue import apply_epilogue
from minisgl_backend.kernels.linear.fp8.quantize import quantize_for
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory, stages_that_fit

_FEW_TILES = 512  # rows up to which tiles of twice the rows would be too few
_TOGETHER = 8  # consecutive tiles of rows, so that a weight's tile comes from the L2 cache


@dataclass(frozen=True)
class ManyRowsShape:
    tile_rows: int
    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


def many_rows_shape(rows: int, block_in: int | None = None, shared: int = LARGEST) -> ManyRowsShape:
    """The tiling that was fastest on an H100 with 128, 256 and 4,096 rows."""
    tile_rows, tile_out, tile_in, warps = (128, 128, 128, 8) if rows > _FEW_TILES else (64, 128, 128, 4)
    tile_in = tile_in if block_in is None else min(tile_in, block_in)
    stages = stages_that_fit(4, tile_in * (tile_rows + tile_out), shared)
    return ManyRowsShape(tile_rows, tile_out, tile_in, warps, stages)


def run(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    numbers, scales = quantize_for(weight, x, call)
    out = linear(numbers, scales, weight, x.dtype, bias=call.bias, residual=call.residual)
    return apply_epilogue(device, out, call._replace(bias=None, residual=None))


def linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: Fp8Weight,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    shape: ManyRowsShape | None = None,
) -> torch.Tensor:
    """x FP8 [rows, size_in] -> [rows, size_out] in `dtype`.

    x_scale [rows]; for weights in blocks [rows, groups], whose columns are contiguous.
    """
    (rows, size_in), size_out = x.shape, len(weight.numbers)
    block_out, block_in = weight.block or (0, 0)
    shape = shape or many_rows_shape(rows, block_in or None, shared_memory(x.device))
    out = torch.empty((rows, size_out), dtype=dtype, device=x.device)
    _many_rows_kernel[(cdiv(rows, shape.tile_rows) * cdiv(size_out, shape.tile_out),)](
        x, weight.numbers, x_scale, weight.scale, out if bias is None else bias, out if residual is None else residual,
        out, rows,
        SIZE_OUT=size_out, SIZE_IN=size_in, TILE_ROWS=shape.tile_rows, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in,
        TOGETHER=_TOGETHER, BLOCK_OUT=block_out, BLOCK_IN=block_in, BIAS=bias is not None,
        RESIDUAL=residual is not None, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _many_rows_kernel(
    x_ptr, weight_ptr, x_scale_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, rows,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    task, row_tiles = tl.program_id(0), tl.cdiv(rows, TILE_ROWS)
    out_tiles: tl.constexpr = (SIZE_OUT + TILE_OUT - 1) // TILE_OUT
    first = task // (TOGETHER * out_tiles) * TOGETHER
    some = tl.minimum(row_tiles - first, TOGETHER)
    column = (task % (TOGETHER * out_tiles)) // some * TILE_OUT
    groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN if BLOCK_IN else 1
    # Where a tile's outputs belong to one block, its scale is a scalar, which saves an operation per partial sum.
    one_block: tl.constexpr = BLOCK_OUT >= TILE_OUT and BLOCK_OUT % TILE_OUT == 0
    r = (first + task % some) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    o = column + tl.arange(0, TILE_OUT)
    r_ok, o_ok = r < rows, o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    acc = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    if BLOCK_IN:
        w_scales = scale_ptr + (column if one_block else o) // BLOCK_OUT * groups
        w_scale = tl.load(w_scales) if one_block else tl.load(w_scales, mask=o_ok, other=0.0)
    else:
        w_scale = tl.load(scale_ptr + o, mask=o_ok, other=0.0)
    x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
    for start in range(0, SIZE_IN, TILE_IN):
        i_ok = start + k < SIZE_IN
        x = tl.load(x_ptr + r.to(tl.int64)[:, None] * SIZE_IN + start + k[None, :],
                    mask=r_ok[:, None] & i_ok[None, :], other=0.0)  # fmt: skip
        w = tl.load(weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN + start + k[None, :],
                    mask=o_ok[:, None] & i_ok[None, :], other=0.0)  # fmt: skip
        product = tl.dot(x, w.T)
        if BLOCK_IN:
            if one_block:
                acc += product * (x_scale * w_scale)[:, None]
            else:
                acc += product * (x_scale[:, None] * w_scale[None, :])
            # Scales of the next block, while its tiles are in flight.
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN
            x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
            w_scale = tl.load(w_scales + g) if one_block else tl.load(w_scales + g, mask=o_ok, other=0.0)
        else:
            acc += product
    if BLOCK_IN == 0:
        acc = acc * x_scale[:, None] * w_scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[None, :]
    address = r.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
    ok = r_ok[:, None] & o_ok[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
