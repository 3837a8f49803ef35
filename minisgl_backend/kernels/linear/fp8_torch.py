"""FP8 weights in plain torch: what CPUs run, and what the kernels for GPUs are tested against.

Numbers are e4m3 without infinities (Micikevicius et al., 2022), weights with a scale for each output, activations with
one for each token, made when they come. Products of FP8 numbers are exact in float32, in which they are summed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kernels.torch_ops import activate_mul

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
LEAST = 1e-10  # of a row's largest number: what is all zero has a scale, too
_ROWS_AT_ONCE = 4096  # of a weight while it is quantized: in float32 it would take four times its memory


def quantize_outputs(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [..., outputs, inputs] -> FP8 of the same shape, and float32 scales [..., outputs]."""
    rows = weight.reshape(-1, weight.shape[-1])
    numbers = torch.empty(rows.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=weight.device)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        scaled, scales[part] = _scaled(rows[part])
        numbers[part].copy_(scaled)
    return numbers.view(weight.shape), scales.view(weight.shape[:-1])


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] -> FP8 numbers as float32, and float32 scales [num_tokens]."""
    scaled, scales = _scaled(x)
    return scaled.to(FP8).float(), scales


def _scaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows32 = rows.float()
    scales = rows32.abs().amax(-1).clamp_min(LEAST) / LARGEST
    return (rows32 / scales.unsqueeze(-1)).clamp(-LARGEST, LARGEST), scales


class Fp8Kernels:
    """GEMMs and experts with FP8 weights, by torch. Made for each model; all its FP8 weights hold it."""

    def __init__(self, ops: Ops) -> None:
        """ops: of the same device."""
        self.ops = ops

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """As `PlainKernels.linear`: weight FP8 [size_out, size_in], scale float32 [size_out]."""
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        out = _product(*quantize_tokens(x), weight, scale)
        if bias is not None:
            out += bias.float()
        if activation is not None:
            out = activate_mul(out, activation)
        if residual is not None:
            out += residual.float()
        return out.to(x.dtype)

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
    ) -> torch.Tensor:
        """As `PlainKernels.moe`: weights FP8 as there, scales float32 [num_experts, outputs]. The implementation in
        torch synchronises with the device."""
        numbers, scales = quantize_tokens(x)
        out = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
        for expert in expert_ids.unique().tolist():
            tokens, choices = torch.where(expert_ids == expert)
            gate_and_up = _product(numbers[tokens], scales[tokens], gate_up[expert], gate_up_scale[expert])
            activated = activate_mul(gate_and_up, activation).to(x.dtype)
            out[tokens, choices] = _product(*quantize_tokens(activated), down[expert], down_scale[expert])
        summed = (out * expert_weights.float().unsqueeze(-1)).sum(1)
        return (summed if residual is None else summed + residual.float()).to(x.dtype)


def _product(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x float32 [num_tokens, size_in] and weight FP8 [size_out, size_in], scaled: float32 [num_tokens, size_out]."""
    return F.linear(x, weight.float()) * x_scale.unsqueeze(1) * scale
