"""Weights as kernels take them whose activations stay in 16 bits: plain numbers, or FP8 with scales.

For a few rows this beats GEMMs in FP8, whose activations need a kernel more each: the time goes to reading the weights.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight

Streamed: TypeAlias = torch.Tensor | Fp8Weight


def operand_of(weight: Streamed) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The numbers, the scales (or anything, where there are none), and the kernel's arguments that say which."""
    if isinstance(weight, torch.Tensor):
        return weight, weight, {"SCALED": False, "BLOCK_OUT": 0, "BLOCK_IN": 0}
    block_out, block_in = weight.block or (0, 0)
    return weight.numbers, weight.scale, {"SCALED": True, "BLOCK_OUT": block_out, "BLOCK_IN": block_in}


@triton.jit
def scales_of(
    scale_ptr, expert, row, OUTPUTS: tl.constexpr, SIZE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Where the scales of rows of an expert's weight are: those of their first block of inputs, or one per row."""
    if BLOCK_IN:
        groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN
        blocks: tl.constexpr = (OUTPUTS + BLOCK_OUT - 1) // BLOCK_OUT
        return scale_ptr + (expert * blocks + row // BLOCK_OUT) * groups
    else:
        return scale_ptr + expert * OUTPUTS + row


@triton.jit
def load_scales(
    at, ok, start, SIZE_IN: tl.constexpr, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK_IN: tl.constexpr
):  # fmt: skip
    """Of rows `at` (`scales_of`) of any shape: one each; or for WIDTH inputs from `start` on, with one more dimension;
    1.0 for plain numbers."""
    if BLOCK_IN:
        g = tl.arange(0, WIDTH // BLOCK_IN)
        g_ok = start + g * BLOCK_IN < SIZE_IN
        return tl.load(tl.expand_dims(at, -1) + start // BLOCK_IN + g, mask=tl.expand_dims(ok, -1) & g_ok, other=0.0)
    elif SCALED:
        return tl.load(at, mask=ok, other=0.0)
    else:
        return 1.0


@triton.jit
def sums_of_rows(products, scales, SCALED: tl.constexpr, BLOCK_IN: tl.constexpr):
    """products [rows, inputs] added up by row, with the scales of `load_scales`."""
    if BLOCK_IN:
        rows: tl.constexpr = products.shape[0]
        blocks: tl.constexpr = products.shape[1] // BLOCK_IN
        return tl.sum(tl.sum(tl.reshape(products, (rows, blocks, BLOCK_IN)), 2) * scales, 1)
    elif SCALED:
        return tl.sum(products, 1) * scales
    else:
        return tl.sum(products, 1)
