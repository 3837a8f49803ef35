"""Keys and values of all layers, in pages."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from minisgl_backend.kv.latent import KVLayout
from minisgl_backend.kv.layout import ONE, KVScales, LayerKV


def max_pages(page_size: int) -> int:
    """Pages that a pool can have: a slot is an int32, and one page more is the padding page."""
    return (2**31 - 1) // page_size - 1


class KVPool:
    """`num_pages` pages with the ids 1 to num_pages, and page 0, the padding page, which no sequence owns.

    A page id means the same page in all layers, whatever their layouts: a sequence has one page table.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        page_size: int,
        num_pages: int,
        device: torch.device,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        """`layouts` and `scales`: one for each layer; no scales: all are 1."""
        self.num_pages = num_pages
        self.page_size = page_size
        # One piece of memory for each layout: many small ones would each be rounded up.
        unused = {
            layout: iter(layout.allocate(layouts.count(layout), num_pages + 1, page_size, device))
            for layout in set(layouts)
        }
        scales = scales or [ONE] * len(layouts)
        self._layers: list[LayerKV] = []
        for layout, layer_scales in zip(layouts, scales, strict=True):
            self._layers.append(layout.layer(next(unused[layout]), layer_scales))

    @staticmethod
    def bytes_per_page(layouts: Sequence[KVLayout], page_size: int) -> int:
        """Device memory of one page, all layers."""
        return sum(layout.bytes_per_token for layout in layouts) * page_size

    def clear(self, pages: torch.Tensor) -> None:
        """Sets pages (int [num_cleared]) to zero in all layers."""
        pages = pages.long()
        for kv in self._layers:
            for cache in (kv.k, kv.v):
                cache.view(torch.uint8).index_fill_(0, pages, 0)  # zero is all bits 0 in every format

    def layer(self, layer_index: int) -> LayerKV:
        """Keys and values of one layer, with `num_pages` + 1 pages."""
        return self._layers[layer_index]

    def part(self, first: int, count: int) -> KVPool:
        """`count` of the layers, from `first` on, as a pool of their own with the same pages: of one of several models
        that share them."""
        part = copy.copy(self)
        part._layers = self._layers[first : first + count]
        return part
