"""CUTLASS GEMMs of sgl-kernel (Apache-2.0): 8 bits with scales of rows and outputs, or FP8 in blocks.

Each of its wheels is built for one version of torch and of CUDA, and fails in many ways with others. So nothing here is
used unless it was measured at start: see measured.py.
"""

from __future__ import annotations

import torch


def fp8_scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x FP8 [rows, size_in] @ weight.T, both scaled by row, plus bias [size_out]: [rows, size_out] in `dtype`.

    weight FP8 [size_out, size_in]; x_scale [rows] and scale [size_out] float32.
    """
    import sgl_kernel

    out: torch.Tensor = sgl_kernel.fp8_scaled_mm(
        x, weight.t(), x_scale.unsqueeze(1), scale.unsqueeze(1), dtype, bias=bias
    )  # fmt: skip
    return out


def fp8_blockwise_scaled_mm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As `fp8_scaled_mm`, with x in groups of 128 inputs and the weight in blocks of 128 x 128: x_scale [rows, groups],
    column-major; scale [blocks of outputs, blocks of inputs]."""
    import sgl_kernel

    out: torch.Tensor = sgl_kernel.fp8_blockwise_scaled_mm(x, weight.t(), x_scale, scale.t(), dtype)
    return out


def int8_scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """As `fp8_scaled_mm`, of int8."""
    import sgl_kernel

    out: torch.Tensor = sgl_kernel.int8_scaled_mm(
        x, weight.t(), x_scale.unsqueeze(1), scale.unsqueeze(1), dtype, bias=bias
    )  # fmt: skip
    return out
