"""GEMMs of one row with FP8 weights, in the Triton language: the row keeps its 16 bits, which saves the kernel that
quantizes it, and norm and epilogue are inside. From two rows on the tensor cores with FP8 activations are faster.

Weights stream through registers, as in plain/small_rows.py's `_vector_kernel`, and become float32 there, which takes
nearly the time of reading them. Adding products up in place, so that lanes meet once at the end, was slower: sums hold
too many registers.

`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.fp8.scaled import load_scales, operand_of, scales_of
from minisgl_backend.kernels.linear.kernels import GemmDevice


class RowShape(NamedTuple):
    """Tiling: outputs (after gating) of a program, inputs per step, warps."""

    tile_out: int
    tile_in: int
    num_warps: int


def row_shape(size_in: int, gated: bool, block_in: int = 0) -> RowShape:
    """Measured on an H200, of Qwen3-14B's and Qwen3-30B-A3B's weights: few inputs are one step."""
    padded = next_power_of_2(size_in)
    if padded <= 4096:
        tile_out = (4 if gated else 8) if padded <= 2048 else 4
        return RowShape(tile_out, max(padded, block_in), max(1, min(8, tile_out * padded // 2048)))
    return RowShape(4, 1024 if padded <= 8192 else 2048, 4)


def run(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    return linear(x, weight, call, pdl=device.pdl(x))


def linear(
    x: torch.Tensor, weight: Fp8Weight, call: GemmCall, *, shape: RowShape | None = None, pdl: bool = False
) -> torch.Tensor:
    """See `GemmCall`: x [1, size_in]."""
    norm_weight, eps, bias, residual, activation, *_ = call
    numbers, scale, weight_format = operand_of(weight)
    gated, (size_out, size_in) = activation is not None, numbers.shape
    size_out = size_out // 2 if gated else size_out
    shape = shape or row_shape(size_in, gated, weight_format["BLOCK_IN"])
    out = torch.empty((1, size_out), dtype=x.dtype, device=x.device)
    _one_row_kernel[(cdiv(size_out, shape.tile_out),)](
        x, numbers, scale, x if norm_weight is None else norm_weight, x if bias is None else bias,
        x if residual is None else residual, out, eps, SIZE_OUT=size_out, SIZE_IN=size_in, TILE_OUT=shape.tile_out,
        TILE_IN=shape.tile_in, NORM=norm_weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
        GATED=gated, ACTIVATION=activation, **weight_format, num_warps=shape.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, scale_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, eps,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
    o = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    outputs: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    scale_at = scales_of(scale_ptr, 0, o, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    up_at = scales_of(scale_ptr, 0, SIZE_OUT + o, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    acc = tl.zeros([TILE_OUT], tl.float32)
    acc_up = tl.zeros([TILE_OUT], tl.float32)
    squares = 0.0
    for step in tl.static_range(0, (SIZE_IN + TILE_IN - 1) // TILE_IN):
        i = step * TILE_IN + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(rows + i[None, :], mask=w_ok, other=0.0)
        scale = load_scales(scale_at, o_ok, step * TILE_IN, SIZE_IN, TILE_IN, False, BLOCK_IN)
        if GATED:
            w_up = tl.load(rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
            up_scale = load_scales(up_at, o_ok, step * TILE_IN, SIZE_IN, TILE_IN, False, BLOCK_IN)
        if NORM:
            norm = tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        if PDL and step == 0:  # weights never change, so their first tile is loaded before the previous kernel is over
            tl_cuda.gdc_wait()
        x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(x * x, 0)
            x = x * norm
        acc += tl.sum(_in_float32(w, scale, BLOCK_IN) * x[None, :], 1)
        if GATED:
            acc_up += tl.sum(_in_float32(w_up, up_scale, BLOCK_IN) * x[None, :], 1)
    if BLOCK_IN == 0:
        acc *= tl.load(scale_at, mask=o_ok, other=0.0)
        if GATED:
            acc_up *= tl.load(up_at, mask=o_ok, other=0.0)
    if NORM:
        rms = 1.0 / tl.sqrt(squares / SIZE_IN + eps)
        acc *= rms
        acc_up *= rms
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
    if GATED:
        if BIAS:
            acc_up += tl.load(bias_ptr + SIZE_OUT + o, mask=o_ok, other=0.0).to(tl.float32)
        acc = gate_mul(acc, acc_up, ACTIVATION)
    if RESIDUAL:
        acc += tl.load(residual_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + o, acc.to(out_ptr.dtype.element_ty), mask=o_ok)


@triton.jit
def _in_float32(w, scale, BLOCK_IN: tl.constexpr):
    """Numbers w [outputs, inputs], times their blocks' scales [outputs, blocks]."""
    if BLOCK_IN:
        outputs: tl.constexpr = w.shape[0]
        inputs: tl.constexpr = w.shape[1]
        wide = tl.reshape(w.to(tl.float32), (outputs, inputs // BLOCK_IN, BLOCK_IN)) * scale[:, :, None]
        return tl.reshape(wide, (outputs, inputs))
    else:
        return w.to(tl.float32)
