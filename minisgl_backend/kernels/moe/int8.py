"""Mixtures of experts with INT8 weights and INT8 activations: in torch, and by the kernels of moe/fp8.py.

Those load numbers of one byte and multiply each output by its scale; integers are accumulated as integers within a
tile. Not tuned: activations are quantized by torch.
"""

from __future__ import annotations

import importlib.util

import torch

from minisgl_backend.kernels.linear.int8 import int_gemm, quantize_tokens
from minisgl_backend.kernels.torch_ops import activate_mul


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """As `MixtureKernels.moe`: weights int8 as there, scales float32 [num_experts, outputs]. Synchronises with the
    device where Triton is missing or x is not on a GPU."""
    if x.is_cuda and importlib.util.find_spec("triton") is not None:
        from minisgl_backend.kernels.moe import fp8 as kernels

        return kernels.moe(
            x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale, residual, activation,
            quantize=quantize_tokens,
        )  # fmt: skip
    out = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for expert in expert_ids.unique().tolist():
        tokens, choices = torch.where(expert_ids == expert)
        gate_and_up = _scaled_gemm(x[tokens], gate_up[expert], gate_up_scale[expert])
        activated = activate_mul(gate_and_up, activation).to(x.dtype)
        out[tokens, choices] = _scaled_gemm(activated, down[expert], down_scale[expert])
    summed = (out * expert_weights.float().unsqueeze(-1)).sum(1)
    return (summed if residual is None else summed + residual.float()).to(x.dtype)


def _scaled_gemm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers, x_scale = quantize_tokens(x)
    return int_gemm(numbers, weight).float() * x_scale.unsqueeze(1) * scale
