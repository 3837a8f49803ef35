"""Epilogues of GEMMs in the Triton language: reduction of split-K partial sums; then bias, activation, residual, and
the store of the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.elementwise import activate_mul
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.quantize import quantize_activated
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice


def apply_epilogue(device: GemmDevice, out: torch.Tensor, call: GemmCall) -> torch.Tensor:
    """Bias, and activation or residual, of a GEMM whose kernel has none of them inside; out may be overwritten."""
    _, _, bias, residual, activation, _, feeds = call
    if bias is not None:
        out += bias
    if residual is not None:
        return residual.add_(out)
    if activation is None:
        return out
    if isinstance(feeds, Fp8Weight):
        return quantize_activated(out, activation, feeds, device.pdl(out))  # type: ignore[return-value]
    return activate_mul(out, activation, device.pdl(out))


@triton.jit
def leave_part(acc, partial_ptr, counters_ptr, tile, split, o, o_ok, SIZE_OUT: tl.constexpr):
    """Stores this program's partial sums of a tile, acc [outputs, rows], and returns how many programs arrived before
    it. The last to arrive adds all parts in order, so that results do not depend on which one that is."""
    rows: tl.constexpr = acc.shape[1]
    slab = (split * SIZE_OUT + o)[:, None] * rows + tl.arange(0, rows)[None, :]
    tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
    tl.debug_barrier()
    return tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")


@triton.jit
def sum_of_parts(
    partial_ptr, counters_ptr, tile, o, o_ok,
    SPLIT: tl.constexpr, SIZE_OUT: tl.constexpr, TILE_OUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum [TILE_OUT, ROWS] of the partial sums of all programs of a tile; resets the tile's counter."""
    tl.store(counters_ptr + tile, 0)
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    for split in tl.static_range(SPLIT):
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        acc += tl.load(partial_ptr + slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def store_outputs(
    acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok,
    SIZE_OUT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Stores outputs o of rows r from acc [outputs, rows] in float32; with GATED, acc_up is the up half, whose biases
    start SIZE_OUT after the gate's. Out and residual [rows, SIZE_OUT] are contiguous."""
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            acc_up += tl.load(bias_ptr + SIZE_OUT + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
        acc = gate_mul(acc, acc_up, ACTIVATION)
    address = r[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & o_ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
