"""A state that fits into a page: the last vectors of its tokens, from which a layer goes on behind it.

    vectors of one layer   [num_pages, ring length, size]   (position p of a row is at p % ring length of its page)

A full page has what the tokens behind it need, so every border of pages is a state to go on from: the prefix cache,
preemption and drafts need nothing besides the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.kv.layout import KVScales, PageLayout, PagePart


@dataclass(frozen=True, kw_only=True)
class RingLayout(PageLayout):
    """The last `length` vectors of a page, or all where it has fewer tokens."""

    length: int
    size: int  # numbers of a vector, on this rank
    dtype: torch.dtype

    def parts(self, page_size: int) -> tuple[PagePart, ...]:
        return (PagePart((min(self.length, page_size), self.size), self.dtype),)

    def layer(self, tensors: Sequence[torch.Tensor], scales: KVScales) -> torch.Tensor:
        (vectors,) = tensors
        return vectors
