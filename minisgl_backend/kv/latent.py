"""Latents (MLA): one tensor a layer, from which keys and values of all heads are computed (DeepSeek-AI, 2024).

    latents of one layer   [num_pages, page_size, rank + rope_dim]   (a token's latent, then its rotated key)

Read as it is, this is attention with one KV head whose values are the leading part of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_backend.kv.layout import FP8, KVScales, LayerKV, MHALayout


@dataclass(frozen=True, kw_only=True)
class LatentLayout:
    """A latent and a rotated key for each token, the same on every rank; of FP8 numbers the scale is that of keys."""

    rank: int  # numbers of the latent
    rope_dim: int  # of the key
    dtype: torch.dtype

    num_kv_heads: ClassVar[int] = 1

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def head_dim(self) -> int:
        """Numbers of one token."""
        return self.rank + self.rope_dim

    @property
    def bytes_per_token(self) -> int:
        """Of one layer."""
        return self.head_dim * self.dtype.itemsize

    def allocate(self, num_layers: int, num_pages: int, page_size: int, device: torch.device) -> torch.Tensor:
        """[num_layers, num_pages, page_size, rank + rope_dim]; zeros, as of `MHALayout`."""
        return torch.zeros((num_layers, num_pages, page_size, self.head_dim), dtype=self.dtype, device=device)

    def layer(self, memory: torch.Tensor, scales: KVScales) -> LayerKV:
        """What one layer is given of that: memory [num_pages, page_size, rank + rope_dim]."""
        keys = memory.unsqueeze(1)
        return LayerKV(keys, keys[..., : self.rank], scales)


KVLayout = MHALayout | LatentLayout
