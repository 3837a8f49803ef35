"""Experts with 4-bit weights, in plain torch: what CPUs run, and what the kernels for GPUs are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.int4_torch import Int4Weight, dequantize
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.kernels.torch_ops import activate_mul


class Int4MixtureKernels:
    """Experts with 4-bit weights, by torch. Made for each model; all its 4-bit experts hold it."""

    def __init__(self, mixtures: MixtureKernels) -> None:
        """mixtures: of the same device; they route."""
        self.mixtures = mixtures

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: Int4Weight,
        down: Int4Weight,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """As `MixtureKernels.moe`. The implementation in torch synchronises with the device."""
        out = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        for expert in expert_ids.unique().tolist():
            tokens, choices = torch.where(expert_ids == expert)
            gate_and_up = F.linear(x[tokens], dequantize(gate_up.expert(expert), x.dtype))
            activated = activate_mul(gate_and_up, activation)
            out[tokens, choices] = F.linear(activated, dequantize(down.expert(expert), x.dtype)).float()
        summed = (out * expert_weights.float().unsqueeze(-1)).sum(1)
        return (summed if residual is None else summed + residual.float()).to(x.dtype)

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Int4Weight,
        down: Int4Weight,
        experts_per_token: int,
        renormalize: bool,
        *,
        router_bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        """As `MixtureKernels.mixture`."""
        if norm_weight is not None:
            x = self.mixtures.ops.rms_norm(x, norm_weight, eps)
        logits = self.mixtures.plain.linear(x, router, GemmCall(bias=router_bias))
        ids, weights = self.mixtures.route(logits, experts_per_token, renormalize)
        return self.moe(x, ids, weights, gate_up, down, residual, activation)
