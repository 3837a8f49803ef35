"""Activations of gated MLPs in the Triton language, computed in float32; all kernels call these.

`torch_ops.activate_mul` is the reference. ACTIVATION is a name of `layers.config.Activation`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_mul(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up. swiglu_oai (gpt-oss): of both clamped at 7, gate * sigmoid(1.702 * gate) * (up + 1)."""
    if ACTIVATION == "swiglu_oai":
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu: x * sigmoid(x). gelu: x * Phi(x) (Hendrycks and Gimpel, 2016). gelu_tanh: its approximation by tanh."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def tanh(x):
    """With one exponential, to an absolute error of 1e-7; Triton's interpreter has no tanh."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def gate_mul_columns(acc, ACTIVATION: tl.constexpr):
    """`gate_mul` of acc [rows, 2 * size], whose first half of columns are gates."""
    rows: tl.constexpr = acc.shape[0]
    size: tl.constexpr = acc.shape[1] // 2
    gate, up = tl.split(tl.permute(tl.reshape(acc, (rows, 2, size)), (0, 2, 1)))
    return gate_mul(gate, up, ACTIVATION)


@triton.jit
def gate_mul_rows(acc, ACTIVATION: tl.constexpr):
    """`gate_mul` of acc [2 * size, columns], whose first half of rows are gates."""
    size: tl.constexpr = acc.shape[0] // 2
    columns: tl.constexpr = acc.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, size, columns)), (1, 2, 0)))
    return gate_mul(gate, up, ACTIVATION)
