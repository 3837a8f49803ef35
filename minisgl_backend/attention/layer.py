"""What is constant of one layer for attention: bound once, when the KV pool is there, and handed to every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.kv.layout import LayerKV


@dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """Sizes of each head where latents are kept (MLA)."""

    rank: int  # numbers of a latent
    nope_dim: int  # of queries and keys: those that are not rotated
    rope_dim: int  # those that are, whose keys all heads share
    v_dim: int

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentProjection:
    """What computes keys and values of this rank's heads from latents: kv_b_proj of one layer."""

    weight: torch.Tensor  # [num_q_heads, nope_dim + v_dim, rank]
    v_dim: int
    # Latents [n, rank] and a tensor [n, num_q_heads * (nope_dim + v_dim)] that is filled, head for head: key, value.
    expand_into: Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer:
    """One layer's attention on one rank. `AttentionSpec.layer` makes it."""

    index: int  # in the model
    group: int  # in AttentionSpec.groups: layers that share a backend and, in each step, its plan
    cache_group: int  # the page table by which it keeps its tokens (`kv.groups`)
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None  # tokens that a query sees, the last of which is itself; None: all up to itself
    chunk: int | None  # tokens; a query sees those of its own chunk, up to itself; None: of all
    scale: float  # of the scores
    soft_cap: float | None  # scores become soft_cap * tanh(scores / soft_cap), before the mask
    sinks: torch.Tensor | None  # float32 [num_q_heads]: logits that take part in the softmax and have no value
    kv: LayerKV
    latent: LatentProjection | None = None  # where latents are kept (MLA)
