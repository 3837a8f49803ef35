"""Mixtures of experts in plain torch: what CPUs run, and what the kernels for GPUs are tested against.

Experts are computed one after the other, for which the host waits for the device; those of plain weights by torch's
grouped GEMM where it has one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.blocks import BlockWeight
from minisgl_backend.kernels.linear.blocks_reference import numbers_of
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight, quantized_gemm
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.int4.reference import dequantize as dequantize_int4
from minisgl_backend.kernels.linear.int8 import Int8Weight, int_gemm
from minisgl_backend.kernels.linear.int8 import quantize_tokens as quantize_to_int8
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Weight
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight, dequantize
from minisgl_backend.kernels.torch_ops import activate_mul

# Of tokens [num_tokens, inputs], all experts' weight and bias, and an expert's number: [num_tokens, outputs].
Gemm = Callable[[torch.Tensor, Weight, "torch.Tensor | None", int], torch.Tensor]


def mixture(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[torch.Tensor], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`. Synchronises with the device unless `has_grouped_gemm`."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    num_tokens, k = ids.shape
    grouped_ids, order = ids.flatten().sort(stable=True)  # (token, choice) pairs grouped by expert
    ends = torch.searchsorted(grouped_ids, torch.arange(experts.num_experts, device=x.device), right=True)
    grouped = x[torch.div(order, k, rounding_mode="floor")]
    out = torch.empty_like(grouped)
    out[order] = _outputs(experts, grouped, grouped_ids, ends)
    return weighted_sum(out.view(num_tokens, k, -1).float(), weights, call, x.dtype)


def mixture_fp8(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[Fp8Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, of FP8 weights; synchronises with the device."""

    def gemm(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        of_expert = Fp8Weight(weight.numbers[expert], weight.scale[expert], weight.x_scale, weight.block)
        return quantized_gemm(x, of_expert)

    return _one_by_one(kernels, x, experts, call, gemm)


def mixture_int8(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[Int8Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, of INT8 weights; synchronises with the device."""

    def gemm(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        numbers, x_scale = quantize_to_int8(x)
        return int_gemm(numbers, weight.numbers[expert]).float() * x_scale.unsqueeze(1) * weight.scale[expert]

    return _one_by_one(kernels, x, experts, call, gemm)


def mixture_int4(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[Int4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, of 4-bit weights; synchronises with the device."""

    def gemm(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return F.linear(x, dequantize_int4(weight.expert(expert), x.dtype))

    return _one_by_one(kernels, x, experts, call, gemm)


def mixture_mxfp4(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[Mxfp4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, of MXFP4 weights as checkpoints have them; synchronises with the device."""

    def gemm(x: torch.Tensor, weight: Mxfp4Weight, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        plain = dequantize(weight.numbers[expert], weight.scales[expert], x.dtype)
        return F.linear(x, plain, None if bias is None else bias[expert])

    return _one_by_one(kernels, x, experts, call, gemm, by_turns=True)


def mixture_blocks(
    kernels: MixtureKernels, x: torch.Tensor, experts: Experts[list[BlockWeight]], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, of GGUF's blocks; synchronises with the device."""

    def gemm(x: torch.Tensor, weight: list[BlockWeight], bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return F.linear(x, numbers_of(weight[expert]).to(x))

    return _one_by_one(kernels, x, experts, call, gemm)


def _one_by_one(
    kernels: MixtureKernels,
    x: torch.Tensor,
    experts: Experts[Weight],
    call: MixtureCall,
    gemm: Gemm[Weight],
    by_turns: bool = False,
) -> torch.Tensor:
    """by_turns: rows of gate and up alternate."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    out = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        tokens, choices = torch.where(ids == expert)
        gate_up = gemm(x[tokens], experts.gate_up, experts.gate_up_bias, expert)
        if by_turns:
            gate_up = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1)
        activated = activate_mul(gate_up, experts.activation).to(x.dtype)
        out[tokens, choices] = gemm(activated, experts.down, experts.down_bias, expert).float()
    return weighted_sum(out, weights, call, x.dtype)


def weighted_sum(out: torch.Tensor, weights: torch.Tensor, call: MixtureCall, dtype: torch.dtype) -> torch.Tensor:
    """Of out float32 [num_tokens, k, hidden]. Token by token, not accumulated expert by expert: the result does not
    depend on the order of arrival."""
    summed = (out * weights.float().unsqueeze(-1)).sum(dim=1)
    return (summed if call.residual is None else summed + call.residual.float()).to(dtype)


def _outputs(experts: Experts[torch.Tensor], x: torch.Tensor, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's gated MLP over its rows of x [num_pairs, hidden]: x[ends[expert - 1] : ends[expert]]. ids: expert
    of each row."""
    gate_up, down, inner, outer = experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias
    if has_grouped_gemm(x):
        offsets = ends.int()
        out = F.grouped_mm(x, gate_up.transpose(1, 2), offs=offsets)
        gated = activate_mul(out if inner is None else out + inner[ids], experts.activation)
        out = F.grouped_mm(gated, down.transpose(1, 2), offs=offsets)
        return out if outer is None else out + outer[ids]
    out = torch.empty_like(x)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            added = None if inner is None else inner[expert]
            gated = activate_mul(F.linear(x[start:end], gate_up[expert], added), experts.activation)
            out[start:end] = F.linear(gated, down[expert], None if outer is None else outer[expert])
        start = end
    return out


def has_grouped_gemm(x: torch.Tensor) -> bool:
    """Whether torch has a grouped GEMM for these numbers, which needs no group sizes on the host."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    capability = DeviceFacts.of(x.device).capability
    return capability is not None and capability >= (8, 0)
