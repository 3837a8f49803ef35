"""`MixtureKernels` in plain torch, for any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.moe.contract import BEST_OF_GROUP, ExpertChoice, MixtureKernels
from minisgl_backend.kernels.torch_ops import activate_mul


class TorchMixtureKernels(MixtureKernels):
    """See `MixtureKernels`. `moe` synchronises with the device unless `has_grouped_gemm`."""

    def route(
        self, logits: torch.Tensor, experts_per_token: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights

    def choose_experts(
        self, logits: torch.Tensor, choice: ExpertChoice, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        scores = logits.softmax(-1) if choice.scores == "softmax" else logits.sigmoid()
        value = logits if choice.by_logits else scores
        if correction_bias is not None:
            value = value + correction_bias
        if choice.num_groups > 1:
            count = 1 if correction_bias is None else BEST_OF_GROUP
            value = _of_best_groups(value, choice.num_groups, choice.groups_per_token, count)
        ids = value.topk(choice.experts_per_token, dim=-1).indices
        shares = scores.gather(-1, ids)
        if choice.renormalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return ids, shares * choice.scaling

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        num_tokens, experts_per_token = expert_ids.shape
        grouped_ids, order = expert_ids.flatten().sort(stable=True)  # (token, choice) pairs grouped by expert
        experts = torch.arange(gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(grouped_ids, experts, right=True)  # of each expert's pairs
        grouped = x[torch.div(order, experts_per_token, rounding_mode="floor")]
        out = torch.empty_like(grouped)
        out[order] = _experts(grouped, grouped_ids, ends, gate_up, down, activation, biases or (None, None))
        # Summed token by token, not accumulated expert by expert: the result does not depend on the order of arrival.
        out = out.view(num_tokens, experts_per_token, -1).float() * expert_weights.float().unsqueeze(-1)
        summed = out.sum(dim=1)
        return (summed if residual is None else summed + residual.float()).to(x.dtype)


def _of_best_groups(value: torch.Tensor, num_groups: int, groups_per_token: int, count: int) -> torch.Tensor:
    """value [num_tokens, num_experts] with -inf for all experts outside the best groups; a group's score is the sum of
    its `count` best experts."""
    groups = value.unflatten(-1, (num_groups, -1))
    best = groups.topk(count, dim=-1).values.sum(-1).topk(groups_per_token, dim=-1).indices
    chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=value.device).scatter_(-1, best, True)
    return groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)


def _experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    ends: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Each expert's gated MLP over its rows of x [num_pairs, hidden]: x[ends[expert - 1] : ends[expert]]. ids: expert
    of each row."""
    inner, outer = biases
    if has_grouped_gemm(x):
        offsets = ends.int()
        out = F.grouped_mm(x, gate_up.transpose(1, 2), offs=offsets)
        gated = activate_mul(out if inner is None else out + inner[ids], activation)
        out = F.grouped_mm(gated, down.transpose(1, 2), offs=offsets)
        return out if outer is None else out + outer[ids]
    out = torch.empty_like(x)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            added = None if inner is None else inner[expert]
            gated = activate_mul(F.linear(x[start:end], gate_up[expert], added), activation)
            out[start:end] = F.linear(gated, down[expert], None if outer is None else outer[expert])
        start = end
    return out


def has_grouped_gemm(x: torch.Tensor) -> bool:
    """Whether torch has a grouped GEMM for these numbers, which needs no group sizes on the host."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    capability = DeviceFacts.of(x.device).capability
    return capability is not None and capability >= (8, 0)
