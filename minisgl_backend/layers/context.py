"""What one forward pass needs beside its tokens: where keys and values go, and how attention was planned.

Knows nothing of requests. Built anew for every step and passed down as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.hybrid import HybridAttention, HybridPlan
from minisgl_backend.attention.kv_pool import KVPool


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """Tokens are in step order: prefill first, decode after them."""

    pool: KVPool
    slots: torch.Tensor  # int [num_tokens], device; where each token's keys and values go
    attention: HybridAttention
    plan: HybridPlan

    def attend(self, layer_index: int, q: torch.Tensor) -> torch.Tensor:
        """q [num_tokens, num_q_heads, head_dim] -> output of the same shape; this layer's keys are in the pool."""
        return self.attention.attend(q, self.pool.k(layer_index), self.pool.v(layer_index), self.plan)
