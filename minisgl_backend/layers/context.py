"""What one forward pass needs beside its tokens: where keys and values go, and how attention was planned.

Built anew for every step and passed down as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import QKNormRope
from minisgl_backend.attention.hybrid import HybridAttention, HybridPlan
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.kv.pool import KVPool


@dataclass(frozen=True, kw_only=True)
class ForwardContext(ABC):
    """Tokens are in step order: prefill first, decode after them."""

    pool: KVPool
    slots: torch.Tensor  # int [num_tokens], device; where each token's keys and values go
    wanted: torch.Tensor | None = None  # int [num_wanted], lines that the model is asked for; None: all of them
    rehearses: bool = False  # only layers that launch other kernels than those before them; what comes out is noise
    captured: bool = (
        False  # the pass is captured, or rehearses one that is: what it launches is the same in each replay
    )

    @abstractmethod
    def attend(
        self, layer_index: int, qkv: torch.Tensor, positions: torch.Tensor, rotation: QKNormRope, ops: Ops
    ) -> torch.Tensor:
        """Norm and rotation of each head, the store of keys and values into the pool, then attention.

        qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], which may be overwritten; positions int
        [num_tokens]. Returns [num_tokens, num_q_heads, head_dim].
        """

    def rotate_and_store(
        self, layer_index: int, qkv: torch.Tensor, positions: torch.Tensor, rotation: QKNormRope, ops: Ops
    ) -> torch.Tensor:
        """All of `attend` but attention; returns the queries, [num_tokens, num_q_heads, head_dim]."""
        kv, r = self.pool.layer(layer_index), rotation
        num_q_heads = qkv.shape[1] // kv.k.shape[3] - 2 * kv.k.shape[1]
        return ops.rope_store(
            qkv, r.q_norm, r.k_norm, r.cos_sin, positions, self.slots, kv.k, kv.v, num_q_heads, r.eps, kv.scales
        )


@dataclass(frozen=True, kw_only=True)
class StepContext(ForwardContext):
    """Attends at once, with what was planned for this step."""

    attention: HybridAttention
    plan: HybridPlan

    def attend(
        self, layer_index: int, qkv: torch.Tensor, positions: torch.Tensor, rotation: QKNormRope, ops: Ops
    ) -> torch.Tensor:
        kv = self.pool.layer(layer_index)
        if self.attention.supports_fused_rope(layer_index, self.plan):
            return self.attention.attend_rotating(layer_index, qkv, rotation, kv, self.plan)
        q = self.rotate_and_store(layer_index, qkv, positions, rotation, ops)
        return self.attention.attend(layer_index, q, kv, self.plan)
