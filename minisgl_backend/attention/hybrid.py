"""Attention of a whole step: one backend for its prefill part and one, often the same, for its decode part.

In a step's tokens the prefill part comes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionBackend, DecodeInputs, Plan, PrefillInputs, QKNormRope


@dataclass(frozen=True)
class HybridPlan:
    """Plans of the two parts; None for a part that the step does not have."""

    prefill: Plan | None
    decode: Plan | None
    num_prefill_tokens: int


class HybridAttention:
    """Both backends were made for the same spec and read the same pool."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill_backend = prefill
        self.decode_backend = decode

    def plan(self, prefill: PrefillInputs | None, decode: DecodeInputs | None) -> HybridPlan:
        """Prepares one step, outside of graphs. At least one part is given."""
        return HybridPlan(
            prefill=self.prefill_backend.plan_prefill(prefill) if prefill is not None else None,
            decode=self.decode_backend.plan_decode(decode) if decode is not None else None,
            num_prefill_tokens=int(prefill.cu_seqlens_q_host[-1]) if prefill is not None else 0,
        )

    def attend(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: HybridPlan) -> torch.Tensor:
        """q [num_tokens, num_q_heads, head_dim] -> output of the same shape, for one layer."""
        parts = self._attend_parts(q, k_cache, v_cache, plan)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_into(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: HybridPlan, out: torch.Tensor
    ) -> None:
        """`attend` with its result in `out`, of the shape of q."""
        torch.cat(self._attend_parts(q, k_cache, v_cache, plan), out=out)

    def _attend_parts(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: HybridPlan
    ) -> list[torch.Tensor]:
        first, parts = plan.num_prefill_tokens, []
        if plan.prefill is not None:
            parts.append(self.prefill_backend.prefill(q[:first], k_cache, v_cache, plan.prefill))
        if plan.decode is not None:
            parts.append(self.decode_backend.decode(q[first:], k_cache, v_cache, plan.decode))
        return parts

    def supports_fused_rope(self, plan: HybridPlan) -> bool:
        """Whether `attend_rotating` serves this step: decode alone, on a backend that has a kernel for it."""
        return plan.prefill is None and self.decode_backend.supports_fused_rope(plan.decode)

    def attend_rotating(
        self, qkv: torch.Tensor, rotation: QKNormRope, k_cache: torch.Tensor, v_cache: torch.Tensor, plan: HybridPlan
    ) -> torch.Tensor:
        """See AttentionBackend.decode_with_rope; only where `supports_fused_rope` says so."""
        return self.decode_backend.decode_with_rope(qkv, rotation, k_cache, v_cache, plan.decode)

    def allocate_graph(self, max_batch_size: int) -> None:
        """See AttentionBackend: only decode runs under graphs."""
        self.decode_backend.allocate_graph(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> HybridPlan:
        return HybridPlan(None, self.decode_backend.plan_capture(inputs), 0)

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self.decode_backend.plan_replay(inputs)
