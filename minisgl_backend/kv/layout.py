"""How a layer keeps its tokens, and in which number format.

    keys or values of one layer   [num_pages, num_kv_heads, page_size, head_dim]   (head-major pages)
    slot of a token               page_id * page_size + position % page_size

Head-major pages (HND) let a kernel read a page of one head as one piece.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minisgl_backend.kv.kinds import CacheKind
from minisgl_backend.number_formats import FP8_E4M3

FP8: torch.dtype = getattr(torch, FP8_E4M3)  # 1 sign, 4 exponent and 3 mantissa bits, no infinities


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


class PagePart(NamedTuple):
    """One tensor's share of a page: where it grows with the page's tokens, `page_size` is in its shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PageLayout(ABC):
    """What a page holds of one layer on one rank. Layouts are values: equal ones can share a page's memory."""

    @abstractmethod
    def parts(self, page_size: int) -> tuple[PagePart, ...]:
        """The tensors that a page of `page_size` tokens consists of. Some may hold numbers of the page as a whole."""

    @abstractmethod
    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> Any:
        """What the layer is given of these, each [num_pages, *shape] of a part."""

    def bytes_per_page(self, page_size: int) -> int:
        """Of one layer."""
        return sum(part.num_bytes for part in self.parts(page_size))


class CacheLayout(PageLayout):
    """What attention reads."""

    num_kv_heads: int
    head_dim: int  # numbers of a key
    dtype: torch.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    @abstractmethod
    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> LayerKV: ...


@dataclass(frozen=True, kw_only=True)
class MHALayout(CacheLayout):
    """Keys and values of equal size for each KV head of this rank (MHA, GQA and MQA alike)."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def parts(self, page_size: int) -> tuple[PagePart, ...]:
        """Keys, then values."""
        return (PagePart((self.num_kv_heads, page_size, self.head_dim), self.dtype),) * 2

    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> LayerKV:
        keys, values = tensors
        return LayerKV(keys, values, scales)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps: of which tokens, and how."""

    kind: CacheKind
    layout: CacheLayout
