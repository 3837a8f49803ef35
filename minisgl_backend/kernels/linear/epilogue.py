"""What follows the sums of a GEMM in the Triton language: bias, activation, residual, and the store of the result."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.activation import gate_mul


@triton.jit
def store_outputs(
    acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok,
    SIZE_OUT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Outputs o of rows r, of sums acc [outputs, rows] in float32; with GATED acc_up are those of the up half, whose
    biases stand SIZE_OUT behind the gate's. Out and residual [rows, SIZE_OUT] have rows that touch."""
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
