"""`Fp8MixtureKernels` on a GPU."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe.fp8 import moe
from minisgl_backend.kernels.moe.fp8_torch import Fp8MixtureKernels
from minisgl_backend.kernels.triton_ops import TritonOps


class TritonFp8MixtureKernels(Fp8MixtureKernels):
    """See `Fp8MixtureKernels`. Nothing synchronises with the device."""

    def __init__(self, ops: TritonOps) -> None:
        self._ops = ops

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        x_scales: torch.Tensor | None = None,
        blocks: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> torch.Tensor:
        return moe(
            x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale, residual, activation, x_scales,
            blocks, pdl=self._ops.moe_pdl(x),
        )  # fmt: skip
