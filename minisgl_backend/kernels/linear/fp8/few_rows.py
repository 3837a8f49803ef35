"""GEMMs with FP8 weights on GPUs that multiply FP8 (compute capability 8.9 and later).

Activations are quantized by a separate kernel, with the norm inside: with quantization in each program of the GEMM,
which then reads all of x twice, the GEMM took twice as long. GEMMs with few rows are bound by reading the weights: a
Triton kernel streams them through the tensor cores, designed like small_rows.py's `_linear_kernel` and with its
epilogues. A lone row keeps its 16 bits, without that separate kernel (one_row.py). More rows use torch's
`_scaled_mm`, sgl-kernel's where that was measured faster (both libraries.py), or many_rows.py where neither supports
them.

Hopper's tensor cores accumulate FP8 with 14 bits (DeepSeek-V3, section 3.3.2); after PROMOTE inputs the partial sum is
added to one in float32.

`pdl`: programmatic dependent launch, whose rules are in small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.epilogue import leave_part, store_outputs, sum_of_parts
from minisgl_backend.kernels.linear.fp8.quantize import QuantizedRows, quantize_for
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST as LARGEST_SHARED
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit

_MAX_SPLIT = 8
PROMOTE = 256


@dataclass(frozen=True)
class LinearShape:
    """Tiling of a GEMM: tiles of the weight; `split` programs share each row (split-K)."""

    tile_out: int
    tile_in: int
    split: int
    num_stages: int


@cache
def linear_shape(
    rows: int,
    size_out: int,
    size_in: int,
    gated: bool = False,
    num_sms: int = 132,
    shared: int = LARGEST_SHARED,
    block_in: int | None = None,
) -> LinearShape:
    """The tiling that was fastest on an H100 in a chain of Qwen3-14B's GEMMs with 1, 8 and 64 rows. block_in: inputs
    that share a scale."""
    padded = max(16, next_power_of_2(rows))
    tile_out, tile_in, split = 64, 128 if gated and padded > 32 else 256, 1
    most = num_sms * 4 / 5  # programs
    if block_in is not None:
        tile_in, most = block_in, num_sms * 3 / 2
    programs = cdiv(size_out, tile_out)
    while not gated and programs * split < most and split < _MAX_SPLIT and size_in >= split * 4 * tile_in:
        split *= 2
    if block_in is None:
        deepest = 5 if split == 1 and tile_in == 256 else 3
    else:
        deepest = 3 if gated or padded > 16 else 4 if split > 1 else 6
    tile_rows = tile_out * (2 if gated else 1) + padded
    stages = stages_that_fit(deepest, tile_in * tile_rows, shared)
    return LinearShape(tile_out, tile_in, split, stages)


def run(device: GemmDevice, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
    num_sms = device.facts.multiprocessors
    return linear(x, weight, device.workspace, call, num_sms=num_sms, pdl=device.pdl(x))


def linear(
    x: torch.Tensor | QuantizedRows,
    weight: Fp8Weight,
    workspace: LinearWorkspace,
    call: GemmCall = BARE,
    *,
    shape: LinearShape | None = None,
    num_sms: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """See `GemmCall`; for few rows, see choose.py."""
    _, _, bias, residual, activation, *_ = call
    weight_numbers, scale, block = weight.numbers, weight.scale, weight.block
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = len(weight_numbers) // 2 if gated else len(weight_numbers)
    block_out, block_in = block or (0, 0)
    shape = shape or linear_shape(
        rows, size_out, size_in, gated, num_sms, shared_memory(x.device), None if block is None else block_in
    )
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    numbers, scales = quantize_for(weight, x, call, pdl=pdl)
    padded = max(16, next_power_of_2(rows))
    split = max(1, min(shape.split, workspace.max_split, workspace.partial.numel() // (size_out * padded)))
    part = cdiv(cdiv(size_in, split), shape.tile_in) * shape.tile_in
    split = cdiv(size_in, part)
    _linear_kernel[(cdiv(size_out, shape.tile_out), split)](
        numbers, scales, weight_numbers, scale, out if bias is None else bias,
        out if residual is None else residual, out,
        workspace.partial, workspace.counters, rows, SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split,
        ROWS=padded, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in, BLOCK_OUT=block_out, BLOCK_IN=block_in,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation,
        IMPRECISE=min(PROMOTE, shape.tile_in), num_warps=4, num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, rows,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    IMPRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x and weight are FP8 with a scale for each row. With a BLOCK_IN, which TILE_IN divides, x has a scale for each
    row and block of inputs, and the weight one for each block of outputs and inputs."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    k = tl.arange(0, TILE_IN)
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    x_rows = x_ptr + r[:, None] * SIZE_IN
    groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN if BLOCK_IN else 1
    if BLOCK_IN:
        w_scales = scale_ptr + (o // BLOCK_OUT) * groups
        up_scales = scale_ptr + ((SIZE_OUT + o) // BLOCK_OUT) * groups
    else:
        w_scale = tl.load(scale_ptr + o, mask=o_ok, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    if BLOCK_IN == 0:
        x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    begin = split * PART
    end = tl.minimum(begin + PART, SIZE_IN)
    if BLOCK_IN:
        g = begin // BLOCK_IN
        x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
        w_scale = tl.load(w_scales + g, mask=o_ok, other=0.0)
        if GATED:
            up_scale = tl.load(up_scales + g, mask=o_ok, other=0.0)
    for start in tl.range(begin, end, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0)
        x = tl.trans(tl.load(x_rows + i[None, :], mask=r_ok[:, None] & i_ok[None, :], other=0.0))
        if BLOCK_IN:
            acc += tl.dot(w, x) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=IMPRECISE)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
            if BLOCK_IN:
                acc_up += tl.dot(w_up, x) * (up_scale[:, None] * x_scale[None, :])
            else:
                acc_up = tl.dot(w_up, x, acc_up, max_num_imprecise_acc=IMPRECISE)
        if BLOCK_IN:  # scales of the next block, while its tiles are in flight
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN
            x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
            w_scale = tl.load(w_scales + g, mask=o_ok, other=0.0)
            if GATED:
                up_scale = tl.load(up_scales + g, mask=o_ok, other=0.0)

    if SPLIT > 1:
        if leave_part(acc, partial_ptr, counters_ptr, tile, split, o, o_ok, SIZE_OUT) != SPLIT - 1:
            return
        acc = sum_of_parts(partial_ptr, counters_ptr, tile, o, o_ok, SPLIT, SIZE_OUT, TILE_OUT, ROWS)

    if BLOCK_IN == 0:
        acc = acc * w_scale[:, None] * x_scale[None, :]
    if GATED and BLOCK_IN == 0:
        up_scale = tl.load(scale_ptr + SIZE_OUT + o, mask=o_ok, other=0.0)
        acc_up = acc_up * up_scale[:, None] * x_scale[None, :]
    store_outputs(
        acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok, SIZE_OUT, BIAS, RESIDUAL, GATED, ACTIVATION
    )  # fmt: skip
