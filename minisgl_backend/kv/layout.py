"""How a layer keeps its tokens, and in which number format.

    keys or values of one layer   [num_pages, num_kv_heads, page_size, head_dim]   (head-major pages)
    slot of a token               page_id * page_size + position % page_size

Head-major pages (HND) let a kernel read a page of one head as one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.number_formats import FP8_E4M3

FP8: torch.dtype = getattr(torch, FP8_E4M3)  # 1 sign, 4 exponent and 3 mantissa bits, no infinities


@dataclass(frozen=True, kw_only=True)
class MHALayout:
    """Keys and values of equal size for each KV head of this rank (MHA, GQA and MQA alike)."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def bytes_per_token(self) -> int:
        """Of one layer, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_layers: int, num_pages: int, page_size: int, device: torch.device) -> torch.Tensor:
        """[num_layers, 2, num_pages, num_kv_heads, page_size, head_dim]; keys are 0, values 1."""
        shape = (num_layers, 2, num_pages, self.num_kv_heads, page_size, self.head_dim)
        # Zeros, not garbage, which may hold NaN: kernels of other packages may read a last page whole.
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def layer(self, memory: torch.Tensor, scales: KVScales) -> LayerKV:
        """What one layer is given of that: memory [2, num_pages, num_kv_heads, page_size, head_dim]."""
        return LayerKV(memory[0], memory[1], scales)


@dataclass(frozen=True)
class KVScales:
    """A stored number times its scale is the number meant. 1 for all but FP8 formats."""

    k: float = 1.0
    v: float = 1.0


ONE = KVScales()


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer: what stores and attention kernels are given."""

    k: torch.Tensor  # [num_pages, num_kv_heads, page_size, head_dim]
    v: torch.Tensor  # the same shape; of latents (`kv.latent`) the leading part of k
    scales: KVScales = ONE
