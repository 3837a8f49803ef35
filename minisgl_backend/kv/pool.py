"""Keys and values of all layers, in pages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from minisgl_backend.kv.layout import ONE, KVScales, LayerKV, PageLayout
from minisgl_backend.kv.zeros import zeros


class LayerPlace(NamedTuple):
    """Where one layer's tokens are in a page of the pool."""

    layout: PageLayout
    part: int  # which part of the page; layers of different cache groups may share one: their pages differ
    split: int = 1  # pages of attention in the page

    def sizes(self, page_size: int) -> tuple[int, ...]:
        """Bytes of a page of the pool in each of the layer's tensors; `page_size`: of attention."""
        return tuple(self.split * part.num_bytes for part in self.layout.parts(page_size))


def max_pages(page_size: int, layers: Iterable[LayerPlace] = ()) -> int:
    """Pages that a pool can have: a slot is an int32, and one page more is the padding page."""
    return (2**31 - 1) // (page_size * max((layer.split for layer in layers), default=1)) - 1


def bytes_per_page(layers: Iterable[LayerPlace], page_size: int) -> int:
    """Device memory of one page of a pool of these layers."""
    return sum(sum(sizes) for sizes in _parts(layers, page_size).values())


def places_after(before: Sequence[LayerPlace], layers: Iterable[LayerPlace]) -> tuple[LayerPlace, ...]:
    """The places of another model's layers, in parts of their own behind those of `before`."""
    count = len({layer.part for layer in before})
    return tuple(layer._replace(part=count + layer.part) for layer in layers)


def _parts(layers: Iterable[LayerPlace], page_size: int) -> dict[int, tuple[int, ...]]:
    """By part of a page: bytes of its tensors, which are the same for all layers that share it."""
    return {layer.part: layer.sizes(page_size) for layer in layers}


class KVPool:
    """`num_pages` pages with the ids 1 to num_pages, and page 0, the padding page, which no sequence owns.

    A page has a part for each of the layers of a cache group (`kv.groups`), and belongs to one group at a time. Where
    there are several, layers at the same place of their groups share the memory of that part. A page is one of
    attention's pages, or, for a layer with a `split`, so many: those of page p are p * split to p * split + split - 1.
    """

    def __init__(
        self,
        layers: Sequence[LayerPlace],
        page_size: int,
        num_pages: int,
        device: torch.device,
        scales: Sequence[KVScales] | None = None,
    ) -> None:
        """`page_size`: of attention; `scales`: by layer; None: all are 1."""
        self.num_pages = num_pages
        self.page_size = page_size
        parts = _parts(layers, page_size)
        self._tensors: dict[int, list[torch.Tensor]] = {}  # by part: uint8 [num_pages + 1, bytes of a page]
        # One allocation for parts alike: many small ones would each be rounded up.
        for sizes in set(parts.values()):
            alike = [part for part, of_part in parts.items() if of_part == sizes]
            # Zeros, not garbage, which may hold NaN: kernels of other packages may read a last page whole.
            memory = zeros((len(alike), num_pages + 1, sum(sizes)), torch.uint8, device)
            for part, of_part in zip(alike, memory, strict=True):
                tensors = of_part.flatten().split([(num_pages + 1) * size for size in sizes])
                self._tensors[part] = [tensor.view(num_pages + 1, -1) for tensor in tensors]
        self._layers = [
            self._layer(layer, of_layer) for layer, of_layer in zip(layers, scales or [ONE] * len(layers), strict=True)
        ]

    def _layer(self, layer: LayerPlace, scales: KVScales) -> Any:
        tensors = [
            memory.flatten().view(part.dtype).view(-1, *part.shape)
            for memory, part in zip(self._tensors[layer.part], layer.layout.parts(self.page_size), strict=True)
        ]
        return layer.layout.layer(tensors, scales)

    def clear(self, pages: torch.Tensor) -> None:
        """Sets pages (int [num_cleared]) to zero, whole."""
        pages = pages.long()
        for part in self._tensors.values():
            for tensor in part:
                tensor.index_fill_(0, pages, 0)  # zero is all bits 0 in every format

    def layer(self, layer_index: int) -> LayerKV:
        """Keys and values of one layer, with `num_pages` + 1 pages, or `split` times as many."""
        kv: LayerKV = self._layers[layer_index]
        return kv

    def ring(self, index: int) -> torch.Tensor:
        """The vectors that a layer keeps with whole pages (`kv.rings`), [num_pages + 1, length, size]."""
        vectors: torch.Tensor = self._layers[index]
        return vectors

    def part(self, first: int, count: int) -> KVPool:
        """`count` of the layers, from `first` on, as a pool of their own with the same pages: of one of several models
        that share them."""
        part = copy.copy(self)
        part._layers = self._layers[first : first + count]
        return part
