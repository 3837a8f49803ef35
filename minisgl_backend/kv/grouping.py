"""Which layers of a model share a page table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl_backend.kv.groups import MOST_GROUPS, CacheGroup
from minisgl_backend.kv.kinds import FULL, CacheKind, order
from minisgl_backend.kv.layout import LayerCache

MOST_KERNEL_PAGES = 8  # of a column: prefixes end, and windows are given back, in whole columns
WORTHWHILE = 15 / 16  # of the memory that fewer groups take: with more that save less, steps cost more than pages do


@dataclass(frozen=True)
class GroupedLayers:
    """Which layers of a model are in which cache group: those that see everything first, those with chunks last."""

    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    group_of_layer: tuple[int, ...] = ()


def group_layers(
    caches: Sequence[LayerCache], page_size: int, max_seq_len: int, most_groups: int = MOST_GROUPS
) -> GroupedLayers:
    """At most `most_groups`; `caches`: by layer; `page_size`: of attention.

    Of all numbers of layers a group, the one with which a row of `max_seq_len` tokens takes least memory, or a few
    percent more in fewer groups. That may be one group of all layers, which keeps everything.
    """
    if len({cache.kind for cache in caches}) == 1:
        return GroupedLayers((CacheGroup(caches[0].kind),), (0,) * len(caches))
    best = GroupedLayers((CacheGroup(),), (0,) * len(caches))
    least = sum(cache.layout.bytes_per_page(page_size) for cache in caches) * FULL.pages_of_row(max_seq_len, page_size)
    alike = _alike(caches, page_size)
    if alike is None:
        return best
    column = alike[0].group.num_pages * alike[0].group.split * page_size
    for size in range(len(caches) - 1, 0, -1):  # fewer groups first
        split = _split(alike, len(caches), size)
        if len(split.groups) > most_groups:
            break
        pages = sum(group.num_pages * group.kind.pages_of_row(max_seq_len, column) for group in split.groups)
        memory = pages * size * alike[0].page_bytes
        if memory <= WORTHWHILE * least or (memory < least and len(split.groups) <= len(best.groups)):
            best, least = split, memory
    return best


@dataclass(frozen=True)
class _Alike:
    """Layers that can be in one group."""

    group: CacheGroup
    layers: list[int]
    page_bytes: int  # of one layer, in a page of the pool


def _alike(caches: Sequence[LayerCache], page_size: int) -> list[_Alike] | None:
    """Layers by kind and by bytes; None where no page fits all of them: the tensors of a layer must be equally large,
    one by one, in a page of the pool."""
    sizes = [tuple(part.num_bytes for part in cache.layout.parts(page_size)) for cache in caches]
    whole = math.lcm(*(of_layer[0] for of_layer in sizes))
    filled = {of_layer: tuple(whole // of_layer[0] * size for size in of_layer) for of_layer in sizes}
    kernel_pages = math.lcm(*(whole // of_layer[0] for of_layer in sizes))
    if len(set(filled.values())) > 1 or kernel_pages > MOST_KERNEL_PAGES:
        return None
    by_kind: dict[tuple[CacheKind, int], list[int]] = {}
    for layer, (cache, of_layer) in enumerate(zip(caches, sizes, strict=True)):
        by_kind.setdefault((cache.kind, whole // of_layer[0]), []).append(layer)
    page_bytes = sum(next(iter(filled.values())))
    return [
        _Alike(CacheGroup(kind, kernel_pages // split, split), layers, page_bytes)
        for (kind, split), layers in sorted(by_kind.items(), key=lambda item: (order(item[0][0]), item[0][1]))
    ]


def _split(alike: Sequence[_Alike], num_layers: int, size: int) -> GroupedLayers:
    """Groups of `size` layers, one kind after the other."""
    groups: list[CacheGroup] = []
    group_of_layer = [0] * num_layers
    for one in alike:
        for count, layer in enumerate(one.layers):
            if count % size == 0:
                groups.append(one.group)
            group_of_layer[layer] = len(groups) - 1
    return GroupedLayers(tuple(groups), tuple(group_of_layer))
