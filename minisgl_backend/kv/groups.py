"""What a row keeps of its pages: all of them, or those that its last tokens see.

Layers that keep tokens alike are a cache group, and each group has a page table of its own over one pool of equal
pages. Of a group with a window, or with attention in chunks, a row keeps the pages that its next token, and what is
being computed, may see.

Pages are equal where groups have equally many layers: layers of one kind, as many as there are, become one group or
several, the last of which may be short (vLLM's hybrid KV cache manager pads in the same way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Int32Array


@dataclass(frozen=True, slots=True)
class Chunk:
    """Attention in chunks: a token sees those of its own one, up to itself."""

    size: int  # tokens; chunks begin at multiples of it


Window = int | Chunk | None  # what a query sees: that many last tokens, itself included; its chunk; all
FULL: tuple[Window, ...] = (None,)  # the windows of a model whose layers all see everything
MOST_GROUPS = 8  # attention is planned for each of them in each step
WORTHWHILE = 15 / 16  # of the memory that fewer groups take: with more that save less, steps cost more than pages do


@dataclass(frozen=True)
class GroupedLayers:
    """Which layers of a model are in which cache group, those without a window first, those with chunks last."""

    windows: tuple[Window, ...]  # by group
    group_of_layer: tuple[int, ...]


def group_layers(
    windows: Sequence[Window], page_size: int, max_seq_len: int, most_groups: int = MOST_GROUPS
) -> GroupedLayers:
    """At most `most_groups`. `windows`: by layer, as in `CacheGroups`.

    Of all numbers of layers a group, the one with which a row of `max_seq_len` tokens takes least memory, or a few
    percent more in fewer groups. That may be one group of all layers, which keeps everything.
    """
    kinds = sorted(set(windows), key=_order)
    if len(kinds) == 1:
        return GroupedLayers(tuple(kinds), (0,) * len(windows))
    best = GroupedLayers(FULL, (0,) * len(windows))
    least = len(windows) * CacheGroups(FULL, page_size).pages_of_row(max_seq_len)
    for size in range(len(windows) - 1, 0, -1):  # fewer groups first
        split = _split(windows, kinds, size)
        if len(split.windows) > most_groups:
            break
        memory = size * CacheGroups(split.windows, page_size).pages_of_row(max_seq_len)
        if memory <= WORTHWHILE * least or (memory < least and len(split.windows) <= len(best.windows)):
            best, least = split, memory
    return best


def _order(window: Window) -> tuple[bool, int]:
    return (True, window.size) if isinstance(window, Chunk) else (False, window or 0)


def _split(windows: Sequence[Window], kinds: Sequence[Window], size: int) -> GroupedLayers:
    """Groups of `size` layers, one kind after the other."""
    groups: list[Window] = []
    group_of_layer = [0] * len(windows)
    for kind in kinds:
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for count, layer in enumerate(layers):
            if count % size == 0:
                groups.append(kind)
            group_of_layer[layer] = len(groups) - 1
    return GroupedLayers(tuple(groups), tuple(group_of_layer))


class CacheGroups:
    """The groups of a model, those without a window first, those with chunks last; both are windows, one of which
    slides.

    With a page border before the next token, a group with a window keeps the pages before it that the token before the
    border, which may be in flight, still sees: `kept` = ceil(w / page) of a window of w tokens, at most as many of a
    chunk of w. So a row that decodes holds at most kept + 1 pages of the group.
    """

    def __init__(self, windows: Sequence[Window], page_size: int) -> None:
        """`windows`: by group."""
        self.windows = tuple(windows)
        self.page_size = page_size
        self.num_groups = len(self.windows)
        self.num_full = self.windows.count(None)
        sliding = [window for window in self.windows if isinstance(window, int)]
        chunks = [window.size for window in self.windows if isinstance(window, Chunk)]
        assert self.windows == (*FULL * self.num_full, *sliding, *map(Chunk, chunks)), "groups come in this order"
        self.num_windows = len(sliding) + len(chunks)
        self.kept = _column([-(-window // page_size) for window in (*sliding, *chunks)])  # int32 [num_windows, 1]
        # Of sliding windows, and room for the others: pages before a border that the token behind it sees.
        self._needed = _column([*(-(-(window - 1) // page_size) for window in sliding), *(0 for _ in chunks)])
        self._num_sliding, self._chunks = len(sliding), _column(chunks)

    def first_kept(self, borders: Int32Array) -> Int32Array:
        """By group with a window, of which page on a row keeps pages; borders: pages before the next token, [n] ->
        [num_windows, n], below 0 where that is all."""
        first: Int32Array = borders - self.kept
        if len(self._chunks):
            first[self._num_sliding :] = self._first_of_chunk(borders * self.page_size - 1)
        return first

    def first_needed(self, borders: Int32Array) -> Int32Array:
        """Likewise of which page on a prefix that ends at the border is needed, by the token behind it."""
        first: Int32Array = borders - self._needed
        if len(self._chunks):
            first[self._num_sliding :] = self._first_of_chunk(borders * self.page_size)
        return first

    def _first_of_chunk(self, positions: Int32Array) -> Int32Array:
        first: Int32Array = positions // self._chunks * self._chunks // self.page_size
        return first

    def pages_for(self, num_tokens: int) -> int:
        """Pages of one group that sees everything."""
        return -(-num_tokens // self.page_size)

    def pages_of_row(self, num_tokens: int) -> int:
        """Pages of all groups that a decoding row of `num_tokens` holds, at most."""
        count = self.pages_for(num_tokens)
        return self.num_full * count + int(np.minimum(self.kept + 1, count).sum())

    def max_length(self, num_pages: int, max_seq_len: int) -> int:
        """Tokens of the longest row that a pool of `num_pages` holds alone, at most `max_seq_len`."""
        low, high = 0, self.pages_for(max_seq_len)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_of_row(middle * self.page_size) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return min(max_seq_len, low * self.page_size)

    def room_in(self, num_pages: int, max_seq_len: int) -> str:
        """What a pool of `num_pages` holds, in words."""
        longest = self.max_length(num_pages, max_seq_len)
        count = num_pages // max(self.pages_of_row(longest), 1)
        room = f"room for {count} sequence{'' if count == 1 else 's'} of {longest} tokens"
        if self.num_groups == 1:
            return room
        kept = "a window or a chunk" if len(self._chunks) else "a window"
        return f"{room}, in {self.num_groups} cache groups, of which {self.num_windows} keep {kept}"


def _column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)
