"""Experts in MXFP4, in plain torch: what CPUs run, and what the kernels for GPUs are tested against.

MXFP4 (OCP Microscaling Formats 1.0): 4-bit numbers, E2M1, in blocks of 32 along the inputs, and a power of two for each
block, E8M0. The lower half of a byte is the earlier number. Rows of gate and up alternate, as in checkpoints of
gpt-oss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.kernels.torch_ops import activate_mul

BLOCK = 32  # numbers that share a scale
BLOCK_BYTES = BLOCK // 2
SCALE_BIAS = 127  # exponent bias of E8M0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Weight = tuple[
    torch.Tensor, torch.Tensor
]  # blocks uint8 [..., outputs, blocks, 16], scales uint8 [..., outputs, blocks]
Biases = tuple[torch.Tensor, torch.Tensor | None]


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks uint8 [..., blocks, 16], scales uint8 [..., blocks] -> [..., 32 * blocks]. Exact in float32 and bfloat16,
    except for the smallest and largest scales."""
    numbers = torch.tensor(E2M1, dtype=torch.float32, device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(numbers[halves.int()], scales.int().unsqueeze(-1) - SCALE_BIAS)
    return values.flatten(-2).to(dtype)


class Mxfp4Kernels:
    """Experts with MXFP4 weights, by torch. Made for each model; all its MXFP4 weights hold it."""

    def __init__(self, mixtures: MixtureKernels) -> None:
        """mixtures: of the same device; they route."""
        self.mixtures = mixtures

    def pack(self, blocks: torch.Tensor, scales: torch.Tensor) -> Weight:
        """A checkpoint's weight in the layout of `moe`."""
        return blocks, scales

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        biases: Biases | None = None,
    ) -> torch.Tensor:
        """As `MixtureKernels.moe`, except that rows of gate and up alternate, in weight and bias: gate_up is `pack` of
        [num_experts, 2 * size, hidden], down of [num_experts, hidden, size]. The implementation in torch synchronises
        with the device."""
        inner, outer = biases or (None, None)
        out = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        for expert in expert_ids.unique().tolist():
            tokens, choices = torch.where(expert_ids == expert)
            weight = dequantize(gate_up[0][expert], gate_up[1][expert], x.dtype)
            turns = F.linear(x[tokens], weight, None if inner is None else inner[expert])
            gated = activate_mul(torch.cat([turns[:, ::2], turns[:, 1::2]], dim=1), activation)
            weight = dequantize(down[0][expert], down[1][expert], x.dtype)
            out[tokens, choices] = F.linear(gated, weight, None if outer is None else outer[expert]).float()
        summed = (out * expert_weights.float().unsqueeze(-1)).sum(1)
        return (summed if residual is None else summed + residual.float()).to(x.dtype)

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        router_bias: torch.Tensor | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        """As `MixtureKernels.mixture`, with the weights of `moe`."""
        if norm_weight is not None:
            x = self.mixtures.ops.rms_norm(x, norm_weight, eps)
        logits = self.mixtures.plain.linear(x, router, GemmCall(bias=router_bias))
        ids, weights = self.mixtures.route(logits, experts_per_token, renormalize)
        return self.moe(x, ids, weights, gate_up, down, residual, activation, biases)
