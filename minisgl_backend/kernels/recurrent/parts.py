"""Pieces of the delta rule's kernels, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """-exp(a_log) * softplus(a + dt_bias)"""
    x = a + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def halves(x, number: tl.constexpr):
    """A float32 number as the sum of two 16-bit ones."""
    if number == tl.bfloat16:
        # Rounded as an integer, which takes no conversion, of which a multiprocessor makes few. Cut off, the lower one
        # would have the sign of x: products of lower ones, which `pair_dot` leaves out, would add up.
        bits = x.to(tl.int32, bitcast=True) + 0x8000
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return high, (x - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
    else:
        high = x.to(number)
        return high, (x - high.to(tl.float32)).to(number)


@triton.jit
def pair_dot(a, b, number: tl.constexpr):
    """a @ b of float32 matrices, by products of pairs of 16-bit numbers: with an error of 2^-16 in bfloat16."""
    if number == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        a_high, a_low = halves(a, number)
        b_high, b_low = halves(b, number)
        low = tl.dot(a_low, b_high, tl.dot(a_high, b_low))
        return tl.dot(a_high, b_high, low)


@triton.jit
def dot_with_pair(a, b):
    """a @ b of a matrix in the model's dtype and a float32 one, which becomes a pair."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        high, low = halves(b, a.dtype)
        return tl.dot(a, high, tl.dot(a, low))
