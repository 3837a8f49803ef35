"""Constants of one layer's attention: bound once, when the KV pool exists, and passed to every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from minisgl_backend.kernels.attention.calls import CachedLayer


@dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """Sizes of each head with latents (MLA)."""

    rank: int  # size of a latent
    nope_dim: int  # dimensions of queries and keys that are not rotated
    rope_dim: int  # those that are; all heads share this part of the key
    v_dim: int

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentProjection:
    """kv_b_proj of one layer, which computes keys and values of this rank's heads from latents."""

    weight: torch.Tensor  # [num_q_heads, nope_dim + v_dim, rank]
    v_dim: int
    # Latents [n, rank] and the output [n, num_q_heads * (nope_dim + v_dim)]: for each head key, then value.
    expand_into: Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionLayer(CachedLayer):
    """One layer's attention on one rank. `AttentionSpec.layer` makes it."""

    index: int  # in the model
    group: int  # in AttentionSpec.groups: layers that share a backend and, in each step, its plan
    cache_group: int  # whose page table has the layer's tokens (`kv.groups`)
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    latent: LatentProjection | None = None  # for layers with latents (MLA)
