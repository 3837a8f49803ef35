"""GEMMs with one row (and two rows of large models), which multiply in registers, and what adapters add to them; see
small_rows.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.plain.adapted import (
    NO_ADAPTERS,
    Adapted,
    added_by_adapter,
    factors_of_row,
    no_adapters,
    parts_of_row,
)
from minisgl_backend.kernels.linear.plain.tiling import LinearShape


def vector_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    call: GemmCall,
    shape: LinearShape,
    pdl: bool = False,
    adapted: Adapted | None = None,
) -> torch.Tensor:
    """`linear` by the kernel of a `vector` shape. adapted: of each row, see `adapted_shape`."""
    arguments, flags, out = launch(x, weight, call, shape, pdl)
    rows, size_out = len(x), out.shape[1]
    _vector_kernel[(cdiv(size_out, shape.tile_out),)](
        *arguments, *(no_adapters(x) if adapted is None else adapted.arguments), call.eps, x.stride(0),
        SIZE_OUT=size_out, SIZE_IN=x.shape[1], ROWS=rows, ROWS_PADDED=next_power_of_2(rows), TILE_OUT=shape.tile_out,
        TILE_IN=shape.tile_in, **(NO_ADAPTERS if adapted is None else adapted.sizes), **flags,
    )  # fmt: skip
    return out


def launch(
    x: torch.Tensor, weight: torch.Tensor, call: GemmCall, shape: LinearShape, pdl: bool
) -> tuple[tuple[torch.Tensor, ...], dict[str, object], torch.Tensor]:
    """The arguments and options that all kernels here have first and last, and the result."""
    norm_weight, _, bias, residual, activation, out, _ = call
    gated, rows = activation is not None, len(x)
    if out is None or rows > 1:  # programs write contiguous rows
        out = torch.empty((rows, len(weight) // 2 if gated else len(weight)), dtype=x.dtype, device=x.device)
    arguments = (
        x, weight, norm_weight if norm_weight is not None else x, bias if bias is not None else x,
        residual if residual is not None else x, out,
    )  # fmt: skip
    flags: dict[str, object] = {
        "NORM": norm_weight is not None,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "ACTIVATION": activation,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **pdl_options(pdl),
    }
    return arguments, flags, out


@triton.jit
def _vector_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr,
    hidden_ptr, b_ptr, slots_ptr, first_ranks_ptr, b_stride, eps, x_stride,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, ROWS: tl.constexpr, ROWS_PADDED: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    RANK: tl.constexpr, ALL_RANKS: tl.constexpr, RANK_PARTS: tl.constexpr, RANK_PARTS_PADDED: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
    o = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    r = tl.arange(0, ROWS_PADDED)
    address = r[None, :] * SIZE_OUT + o[:, None]
    out_ok = (r[None, :] < ROWS) & o_ok[:, None]
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    acc = tl.zeros([TILE_OUT, ROWS_PADDED], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS_PADDED], tl.float32)
    squares = tl.zeros([ROWS_PADDED], tl.float32)
    # Of adapters with RANK; 0: there are none.
    b: tl.tuple = ()
    b_up: tl.tuple = ()
    hidden: tl.tuple = ()
    hidden_up: tl.tuple = ()
    if RANK:
        first = tl.load(first_ranks_ptr + tl.program_id(0) * TILE_OUT)  # tiles are of one output each
        for row in tl.static_range(0, ROWS):
            b += (factors_of_row(b_ptr, slots_ptr, row, o, o_ok, b_stride, RANK),)
            if GATED:
                b_up += (factors_of_row(b_ptr, slots_ptr, row, SIZE_OUT + o, o_ok, b_stride, RANK),)
    STEPS: tl.constexpr = (SIZE_IN + TILE_IN - 1) // TILE_IN
    for step in tl.static_range(0, STEPS):
        i = step * TILE_IN + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
        if NORM:
            norm = tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        if PDL and step == 0:
            # Weights never change, so their first tile is loaded before the previous kernel has finished.
            tl_cuda.gdc_wait()
        if RESIDUAL and step == 0:  # loaded together with x, not after the sums
            added = tl.load(residual_ptr + address, mask=out_ok, other=0.0).to(tl.float32)
        if RANK and step == 0:
            for row in tl.static_range(0, ROWS):
                hidden += (
                    parts_of_row(
                        hidden_ptr, slots_ptr, first, row, ROWS, RANK, ALL_RANKS, RANK_PARTS, RANK_PARTS_PADDED
                    ),
                )
                if GATED:
                    hidden_up += (
                        parts_of_row(
                            hidden_ptr, slots_ptr, RANK, row, ROWS, RANK, ALL_RANKS, RANK_PARTS, RANK_PARTS_PADDED
                        ),
                    )
        for row in tl.static_range(0, ROWS):
            x = tl.load(x_ptr + row * x_stride + i, mask=i_ok, other=0.0).to(tl.float32)
            if NORM:
                squares = tl.where(r == row, squares + tl.sum(x * x, 0), squares)
                x = x * norm
            product = tl.sum(w.to(tl.float32) * x[None, :], 1)
            acc = tl.where(r[None, :] == row, acc + product[:, None], acc)
            if GATED:
                product_up = tl.sum(w_up.to(tl.float32) * x[None, :], 1)
                acc_up = tl.where(r[None, :] == row, acc_up + product_up[:, None], acc_up)
    if RANK:  # before the division by the root mean square, as their input is
        for row in tl.static_range(0, ROWS):
            here = r[None, :] == row
            acc = tl.where(here, acc + added_by_adapter(hidden[row], b[row])[:, None], acc)
            if GATED:
                acc_up = tl.where(here, acc_up + added_by_adapter(hidden_up[row], b_up[row])[:, None], acc_up)
    if NORM:
        scale = 1.0 / tl.sqrt(squares / SIZE_IN + eps)
        acc = acc * scale[None, :]
        acc_up = acc_up * scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = gate_mul(acc, acc_up, ACTIVATION)
    if RESIDUAL:
        acc += added
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=out_ok)
