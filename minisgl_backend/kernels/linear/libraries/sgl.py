"""CUTLASS GEMMs of sgl-kernel (Apache-2.0): 8 bits with scales of rows and outputs, or FP8 in blocks.

Each of its wheels is built for one version of torch and of CUDA, and fails in many ways with others. So nothing here is
used unless it was measured at start: see measured.py.
"""

from __future__ import annotations

from typing import Protocol

import torch


class ScaledRows(Protocol):
    @property
    def numbers(self) -> torch.Tensor:
        """[size_out, size_in]"""

    @property
    def scale(self) -> torch.Tensor:
        """float32 [size_out]"""


def scaled_mm(
    kernel: str, x: torch.Tensor, x_scale: torch.Tensor, weight: ScaledRows, dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """x [rows, size_in] @ weight.T, both scaled by row, plus bias [size_out]: [rows, size_out] in `dtype`.

    kernel: fp8_scaled_mm or int8_scaled_mm, by the format of x and weight; x_scale float32 [rows].
    """
    import sgl_kernel

    multiply = getattr(sgl_kernel, kernel)
    out: torch.Tensor = multiply(
        x, weight.numbers.t(), x_scale.unsqueeze(1), weight.scale.unsqueeze(1), dtype, bias=bias
    )
    return out


def fp8_blockwise_scaled_mm(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As `scaled_mm`, with x in groups of 128 inputs and the weight in blocks of 128 x 128: x_scale [rows, groups],
    column-major; scale [blocks of outputs, blocks of inputs]."""
    import sgl_kernel

    out: torch.Tensor = sgl_kernel.fp8_blockwise_scaled_mm(x, weight.t(), x_scale, scale.t(), dtype)
    return out
