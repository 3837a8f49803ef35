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

    A page has a part for each of the layers of a cache group (`kv.groups`), and belongs to one group at a time. Where
    there are several, layers at the same place of their groups share the memory of that part.
    """

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        page_size: int,
        num_pages: int,
        device: torch.device,
        scales: Sequence[KVScales] | None = None,
        page_parts: Sequence[int] | None = None,
    ) -> None:
        """`layouts`: of the parts of a page. `page_parts`: by layer, index of its part; None: each layer has its own.
        `scales`: by layer; None: all are 1."""
        self.num_pages = num_pages
        self.page_size = page_size
        # One allocation per layout: many small ones would each be rounded up.
        unused = {
            layout: iter(layout.allocate(layouts.count(layout), num_pages + 1, page_size, device))
            for layout in set(layouts)
        }
        parts = [next(unused[layout]) for layout in layouts]
        page_parts = range(len(layouts)) if page_parts is None else page_parts
        scales = scales or [ONE] * len(page_parts)
        self._parts = [layout.layer(part, ONE) for layout, part in zip(layouts, parts, strict=True)]
        self._layers = [
            layouts[index].layer(parts[index], of_layer) for index, of_layer in zip(page_parts, scales, strict=True)
        ]

    @staticmethod
    def bytes_per_page(layouts: Sequence[KVLayout], page_size: int) -> int:
        """Device memory of one page with these parts."""
        return sum(layout.bytes_per_token for layout in layouts) * page_size

    def clear(self, pages: torch.Tensor) -> None:
        """Sets pages (int [num_cleared]) to zero, whole."""
        pages = pages.long()
        for kv in self._parts:
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
