"""Latents (MLA): one tensor a layer, from which keys and values of all heads are computed (DeepSeek-AI, 2024).

    latents of one layer   [num_pages, page_size, rank + rope_dim]   (a token's latent, then its rotated key)

Read as it is, this is attention with one KV head whose values are the leading part of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from minisgl_backend.kv.layout import CacheLayout, KVScales, LayerKV, PagePart


@dataclass(frozen=True, kw_only=True)
class LatentLayout(CacheLayout):
    """A latent and a rotated key for each token, the same on every rank; of FP8 numbers the scale is that of keys."""

    rank: int  # numbers of the latent
    rope_dim: int  # of the key
    dtype: torch.dtype

    num_kv_heads: int = field(default=1, init=False)

    @property
    def head_dim(self) -> int:  # type: ignore[override]  # a field of others
        """Numbers of one token."""
        return self.rank + self.rope_dim

    def parts(self, page_size: int) -> tuple[PagePart, ...]:
        return (PagePart((page_size, self.head_dim), self.dtype),)

    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> LayerKV:
        (latents,) = tensors
        keys = latents.unsqueeze(1)
        return LayerKV(keys, keys[..., : self.rank], scales)
