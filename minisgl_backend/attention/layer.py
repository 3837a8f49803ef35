"""What is constant of one layer for attention: bound once, when the KV pool is there, and handed to every call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.kv.layout import LayerKV


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer:
    """One layer's attention on one rank. `AttentionSpec.layer` makes it."""

    index: int  # in the model
    group: int  # in AttentionSpec.groups: layers that share a backend and, in each step, its plan
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens that a query sees, the last of which is itself; None: all up to itself
    scale: float  # of the scores
    soft_cap: float | None  # scores become soft_cap * tanh(scores / soft_cap), before the mask
    sinks: torch.Tensor | None  # float32 [num_q_heads]: logits that take part in the softmax and have no value
    kv: LayerKV
