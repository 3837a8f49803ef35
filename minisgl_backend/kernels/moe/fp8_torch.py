"""Experts with FP8 weights, in plain torch: what CPUs run, and what the kernels for GPUs are tested against."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.fp8_torch import Fp8Weight, quantized_gemm
from minisgl_backend.kernels.torch_ops import activate_mul


class Fp8MixtureKernels:
    """Experts with FP8 weights, by torch. Made for each model; all its FP8 experts hold it."""

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
        """As `MixtureKernels.moe`: weights FP8 as there, scales float32 [num_experts, outputs]. The implementation in
        torch synchronises with the device.

        x_scales: float32 [2], for all activations before gate_up, and before down. blocks: of gate_up, and of down; see
        `Fp8Weight`.
        """
        before, between = x_scales if x_scales is not None else (None, None)
        of_gate_up, of_down = blocks or (None, None)
        out = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        for expert in expert_ids.unique().tolist():
            tokens, choices = torch.where(expert_ids == expert)
            gate_and_up = quantized_gemm(
                x[tokens], Fp8Weight(gate_up[expert], gate_up_scale[expert], before, of_gate_up)
            )
            activated = activate_mul(gate_and_up, activation).to(x.dtype)
            weight = Fp8Weight(down[expert], down_scale[expert], between, of_down)
            out[tokens, choices] = quantized_gemm(activated, weight)
        summed = (out * expert_weights.float().unsqueeze(-1)).sum(1)
        return (summed if residual is None else summed + residual.float()).to(x.dtype)
