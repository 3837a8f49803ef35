"""`Ops` and `PlainKernels` in plain torch, for any device: used by CPU serving, and the reference of all kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.ops import Ops, QKNormRope
from minisgl_backend.kernels.plain import BEST_OF_GROUP, ExpertChoice, PlainKernels
from minisgl_backend.kv.layout import LayerKV

_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_oai, in all released models


class TorchOps(Ops):
    """See `Ops`."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        normed = _rms_norm(x, weight, eps)
        return normed.to(x.dtype) if out is None else out.copy_(normed)

    def add_norm(
        self, hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float = 1.0
    ) -> torch.Tensor:
        return (hidden.float() + multiplier * _rms_norm(x, weight, eps)).to(hidden.dtype)

    def rope_store(
        self,
        qkv: torch.Tensor,
        rotation: QKNormRope,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
        num_q_heads: int,
    ) -> torch.Tensor:
        _, num_kv_heads, _, head_dim = kv.k.shape
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        qk, v = heads.split([num_q_heads + num_kv_heads, num_kv_heads], dim=1)
        qk = qk.float()
        q_norm, k_norm = rotation.q_norm, rotation.k_norm
        if q_norm is not None and k_norm is not None:
            # q and k heads are normed together; only their weights differ.
            weight = torch.cat([q_norm.expand(num_q_heads, head_dim), k_norm.expand(num_kv_heads, head_dim)]).float()
            qk = qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + rotation.eps) * weight
        rotated = _rotated(qk, rotation.cos_sin[positions].unsqueeze(1)).to(qkv.dtype)
        q, k = rotated.split([num_q_heads, num_kv_heads], dim=1)
        store_tokens(kv.k, k, slots, kv.scales.k)
        store_tokens(kv.v, v, slots, kv.scales.v)
        return q

    def latent_store(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        norm: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        eps: float,
        scale: float = 1.0,
    ) -> torch.Tensor:
        latent, key = latents.split([len(norm), latents.shape[1] - len(norm)], dim=1)
        angles = cos_sin[positions]
        rotated = _rotated(key, angles)
        stored = torch.cat([_rms_norm(latent, norm, eps).to(latents.dtype), rotated], dim=1)
        store_tokens(cache, stored.unsqueeze(1), slots, scale)
        turned = q[..., q.shape[-1] - key.shape[1] :]
        turned.copy_(_rotated(turned, angles.unsqueeze(1)))
        return q


class TorchPlainKernels(PlainKernels):
    """See `PlainKernels`. `moe` synchronises with the device unless `has_grouped_gemm`."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        if residual is None:
            out = F.linear(x, weight, bias)
            return out if activation is None else activate_mul(out, activation)
        out = torch.addmm(residual, x, weight.t())
        return out if bias is None else out + bias

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


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In float32."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., size], whose first half pairs with its second; angles float32 [..., size]: cosines,
    then sines."""
    cos, sin = angles.chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def store_tokens(cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, scale: float = 1.0) -> None:
    """Writes tokens [num_tokens, num_kv_heads, head_dim], divided by `scale`, to a cache as in kv.layout.

    slots int [num_tokens]. Values saturate at the largest number of the cache's format.
    """
    page_size = cache.shape[2]
    pages = torch.div(slots, page_size, rounding_mode="floor")
    if tokens.dtype != cache.dtype:
        largest = torch.finfo(cache.dtype).max
        tokens = (tokens.float() / scale).clamp_(-largest, largest).to(cache.dtype)
    as_bits(cache)[pages, :, slots - pages * page_size] = as_bits(tokens)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as bytes, everything else as it is: torch indexes no FP8 tensors."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def activate_mul(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """gate_up [num_tokens, 2 * size] -> activation(first half) * second half, [num_tokens, size].

    swiglu_oai: of both clamped, gate * sigmoid(alpha * gate) * (up + 1)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=_LIMIT), up.float().clamp(-_LIMIT, _LIMIT)
        return (gate * torch.sigmoid(_ALPHA * gate) * (up + 1.0)).to(gate_up.dtype)
    return (activate(gate.float(), activation) * up.float()).to(gate_up.dtype)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """A `layers.config.UngatedActivation` of each element; the same shape."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[activation])


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
