"""GEMMs with few rows (decode at small batch), bound by reading the weights, in the Triton language.

A step at batch 1 to 16 spends most of its time in launches and in ramping up and down, so each function here fuses two
or three kernels: the norm before the GEMM, the activation or the residual addition after it. The norm needs no separate
pass: y = (x * w_norm) @ W / rms(x), and the loop that reads x also adds up the squares. In float16 the norm comes first
and `_linear_kernel` reads x twice, since x * w_norm could overflow.

There are three kernels. `_vector_kernel` (vector.py), for one row (and two rows of large models), multiplies in
registers and keeps whole weight rows in flight. `_sliced_kernel`, for a few rows and few inputs, has no loop: all
weights of a program are in flight at once, and each of its warps multiplies another slice of the inputs with tensor
cores. `_linear_kernel` streams weights through tensor cores.
GEMMs whose output is too narrow to fill the device are split along the input dimension (split-K), and the program that
arrives last adds the partial sums in order, so that results do not depend on timing.

With `pdl` (programmatic dependent launch, Hopper and later) a kernel starts as soon as every program of the previous
kernel has started; the first two, and the third where `early` says so, then load weights before they wait for the
previous kernel's results. Every kernel lets the next one start before it waits itself. So what a kernel reads before
its wait must have been written before this chain of kernels began: before the last launch without `pdl`, which waits
for all earlier kernels. In a decode step that is the lookup of tokens and slots and the embedding. Everything else is
read, and everything is written, after the wait. Prefetching all weights into the L2 cache before the wait was tried: no
gain, since memory is busy by then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.epilogue import store_outputs
from minisgl_backend.kernels.linear.kernels import GemmDevice
from minisgl_backend.kernels.linear.plain.tiling import LinearShape, linear_shape, long_shape
from minisgl_backend.kernels.linear.plain.vector import launch, vector_linear
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.shared_memory import shared_memory

# Least size of a tensor-core GEMM. Triton 3.4 refuses fewer than 16; 3.5 compiles 8 too, tried without a GPU.
LEAST_ROWS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 16


def run(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    return linear(x, weight, device.workspace, call, pdl=device.pdl(x))


def run_long(device: GemmDevice, x: torch.Tensor, weight: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """With nothing fused: see `long_shape`."""
    size_out, size_in = weight.shape
    shape = long_shape(size_out, size_in, device.facts.multiprocessors)
    return linear(x, weight, device.workspace, call, shape=shape, pdl=device.pdl(x))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: LinearWorkspace,
    call: GemmCall = BARE,
    *,
    shape: LinearShape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See `GemmCall`: x [rows <= 64, size_in] and weight [size_out, size_in] are contiguous; residual is left as it
    is, and `out` is written to where it has one row."""
    eps, gated = call.eps, call.activation is not None
    rows, size_in = x.shape
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = shape or linear_shape(rows, size_out, size_in, gated, shared=shared_memory(x.device))
    if shape.vector:
        return vector_linear(x, weight, call, shape, pdl)
    arguments, flags, out = launch(x, weight, call, shape, pdl)
    if shape.slices > 1:
        if size_in > shape.slices * shape.tile_in * shape.split:
            raise ValueError(f"{size_in} inputs are more than {shape} holds")
        _sliced_kernel[(cdiv(size_out, shape.tile_out), shape.split)](
            *arguments, workspace.partial, workspace.counters, rows, eps, x.stride(0),
            NORM_FIRST=call.norm_weight is not None and x.dtype == torch.float16,
            SIZE_OUT=size_out, SIZE_IN=size_in, SPLIT=shape.split, ROWS=max(LEAST_ROWS, next_power_of_2(rows)),
            TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in, SLICES=shape.slices, **flags,
        )  # fmt: skip
        return out
    split = 1 if gated else shape.split
    part = cdiv(cdiv(size_in, split), shape.tile_in) * shape.tile_in
    split = cdiv(size_in, part)
    _linear_kernel[(cdiv(size_out, shape.tile_out), split)](
        *arguments, workspace.partial, workspace.counters, rows, eps, x.stride(0),
        NORM_FIRST=call.norm_weight is not None and x.dtype == torch.float16,
        SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split,
        ROWS=max(16, next_power_of_2(rows)), TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in,
        EARLY=min(shape.early, part // shape.tile_in), **flags,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _sliced_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    rows, eps, x_stride,
    NORM_FIRST: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, SLICES: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles are [slices, outputs or rows, inputs of a slice]: a batched tl.dot gives each warp a slice."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    PART: tl.constexpr = SLICES * TILE_IN
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    i = split * PART + tl.arange(0, SLICES)[:, None, None] * TILE_IN + tl.arange(0, TILE_IN)[None, None, :]
    w_at = weight_ptr + o.to(tl.int64)[None, :, None] * SIZE_IN + i
    w_ok = o_ok[None, :, None] & (i < SIZE_IN)
    w = tl.load(w_at, mask=w_ok, other=0.0)
    if GATED:
        w_up = tl.load(w_at + SIZE_OUT * SIZE_IN, mask=w_ok, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + i, mask=i < SIZE_IN, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    x_rows = x_ptr + r[None, :, None] * x_stride
    x = tl.load(x_rows + i, mask=r_ok[None, :, None] & (i < SIZE_IN), other=0.0)
    if NORM:
        x32 = x.to(tl.float32)
        squares = tl.sum(x32 * x32, 2)
        for other in tl.static_range(1, SPLIT):
            j = (i + other * PART) % (SPLIT * PART)
            x_other = tl.load(x_rows + j, mask=r_ok[None, :, None] & (j < SIZE_IN), other=0.0).to(tl.float32)
            squares += tl.sum(x_other * x_other, 2)
        if NORM_FIRST:
            scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE_IN + eps)
            x32 = x32 * scale[None, :, None]
        x = (x32 * norm.to(tl.float32)).to(x.dtype)
    x = tl.permute(x, (0, 2, 1))
    acc = tl.sum(tl.dot(w, x, input_precision="ieee"), 0)
    acc_up = acc
    if GATED:
        acc_up = tl.sum(tl.dot(w_up, x, input_precision="ieee"), 0)
    if NORM and not NORM_FIRST:  # the warps' sums of squares are reduced after the GEMM, which need not wait for them
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE_IN + eps)
        acc = acc * scale[None, :]
        acc_up = acc_up * scale[None, :]
    if SPLIT > 1:
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
        up_ptr = partial_ptr + SPLIT * SIZE_OUT * ROWS
        tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
        if GATED:
            tl.store(up_ptr + slab, acc_up, mask=o_ok[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
        acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
        for s in tl.static_range(SPLIT):
            part_slab = (s * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")
            if GATED:
                acc_up += tl.load(up_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")
    store_outputs(
        acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok, SIZE_OUT, BIAS, RESIDUAL, GATED, ACTIVATION
    )  # fmt: skip


@triton.jit
def _rows_of_x(
    x_ptr, norm_ptr, r, r_ok, i, i_ok, x_stride, scale, squares, NORM: tl.constexpr, NORM_FIRST: tl.constexpr
):  # fmt: skip
    """Columns `i` of the rows, [inputs, rows]. NORM: multiplied by the norm's weights. NORM_FIRST: multiplied by
    `scale` before; otherwise their squares are added to `squares`."""
    x = tl.load(x_ptr + r[:, None] * x_stride + i[None, :], mask=r_ok[:, None] & i_ok[None, :], other=0.0)
    if NORM:
        x32 = x.to(tl.float32)
        if NORM_FIRST:
            x32 = x32 * scale[:, None]
        else:
            squares += tl.sum(x32 * x32, 1)
        x = (x32 * tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
    return tl.trans(x), squares


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    rows, eps, x_stride,
    NORM_FIRST: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, EARLY: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    k = tl.arange(0, TILE_IN)
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    begin = split * PART
    end = tl.minimum(begin + PART, SIZE_IN)
    early: tl.tuple = ()
    for tile_early in tl.static_range(EARLY):
        i = begin + tile_early * TILE_IN + k
        w_ok = o_ok[:, None] & (i < end)[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0)
        w_up = w
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
        early += ((w, w_up),)
    if PDL:
        tl_cuda.gdc_wait()
    scale = squares
    if NORM_FIRST:
        # A large activation times its norm weight may overflow float16, so it is divided by the RMS first.
        for start in tl.range(0, SIZE_IN, TILE_IN):
            i = start + k
            x_ok = r_ok[:, None] & (i < SIZE_IN)[None, :]
            x32 = tl.load(x_ptr + r[:, None] * x_stride + i[None, :], mask=x_ok, other=0.0).to(tl.float32)
            squares += tl.sum(x32 * x32, 1)
        scale = 1.0 / tl.sqrt(squares / SIZE_IN + eps)
    for start in tl.range(begin + EARLY * TILE_IN, end, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w = tl.load(weight_rows + i[None, :], mask=o_ok[:, None] & i_ok[None, :], other=0.0)
        x, squares = _rows_of_x(
            x_ptr, norm_ptr, r, r_ok, i, i_ok, x_stride, scale, squares, NORM=NORM, NORM_FIRST=NORM_FIRST
        )
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=o_ok[:, None] & i_ok[None, :], other=0.0)
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")
    # Loaded last, so that memory is not idle while the first loads wait for x.
    for tile_early in tl.static_range(EARLY):
        i = begin + tile_early * TILE_IN + k
        i_ok = i < end
        x, squares = _rows_of_x(
            x_ptr, norm_ptr, r, r_ok, i, i_ok, x_stride, scale, squares, NORM=NORM, NORM_FIRST=NORM_FIRST
        )
        acc = tl.dot(early[tile_early][0], x, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(early[tile_early][1], x, acc_up, input_precision="ieee")

    if SPLIT > 1:
        # The last program to arrive adds the parts in order. The sums of squares are stored next to the outputs.
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
        tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
        squares_base = partial_ptr + SPLIT * SIZE_OUT * ROWS
        if NORM and not NORM_FIRST:
            tl.store(squares_base + (tile * SPLIT + split) * ROWS + r, squares)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
        if NORM and not NORM_FIRST:
            squares = tl.zeros([ROWS], tl.float32)
        for s in tl.static_range(SPLIT):
            part_slab = (s * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")
            if NORM and not NORM_FIRST:
                squares += tl.load(squares_base + (tile * SPLIT + s) * ROWS + r, cache_modifier=".cg")

    if NORM and not NORM_FIRST:
        scale = 1.0 / tl.sqrt(squares / SIZE_IN + eps)
        acc = acc * scale[None, :]
        acc_up = acc_up * scale[None, :]
    store_outputs(
        acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok, SIZE_OUT, BIAS, RESIDUAL, GATED, ACTIVATION
    )  # fmt: skip
