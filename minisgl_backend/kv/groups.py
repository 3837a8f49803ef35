"""What a row keeps of its pages: all of them, or those that its last tokens see.

Layers that keep tokens alike are a cache group, and each group has a page table of its own over one pool of equal
pages. Of a group with a window a row keeps the pages that its next token, and what is being computed, may see.

Pages are equal where groups have equally many layers: layers of one kind, as many as there are, become one group or
several, the last of which may be short (vLLM's hybrid KV cache manager pads in the same way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Int32Array

FULL: tuple[int | None, ...] = (None,)  # the windows of a model whose layers all see everything
MOST_GROUPS = 8  # attention is planned for each of them in each step
WORTHWHILE = 15 / 16  # of the memory that fewer groups take: with more that save less, steps cost more than pages do


@dataclass(frozen=True)
class GroupedLayers:
    """Which layers of a model are in which cache group, those without a window first."""

    windows: tuple[int | None, ...]  # by group
    group_of_layer: tuple[int, ...]


def group_layers(
    windows: Sequence[int | None], page_size: int, max_seq_len: int, most_groups: int = MOST_GROUPS
) -> GroupedLayers:
    """At most `most_groups`. `windows`: by layer, as in `CacheGroups`.

    Of all numbers of layers a group, the one with which a row of `max_seq_len` tokens takes least memory, or a few
    percent more in fewer groups. That may be one group of all layers, which keeps everything.
    """
    kinds = sorted(set(windows), key=lambda window: window or 0)  # without a window first
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


def _split(windows: Sequence[int | None], kinds: Sequence[int | None], size: int) -> GroupedLayers:
    """Groups of `size` layers, one kind after the other."""
    groups: list[int | None] = []
    group_of_layer = [0] * len(windows)
    for kind in kinds:
        layers = [layer for layer, window in enumerate(windows) if window == kind]
        for count, layer in enumerate(layers):
            if count % size == 0:
                groups.append(kind)
            group_of_layer[layer] = len(groups) - 1
    return GroupedLayers(tuple(groups), tuple(group_of_layer))


class CacheGroups:
    """The groups of a model, those without a window first.

    With a page border before the next token, a group with a window of w tokens keeps `kept` = ceil(w / page) pages
    before it: what the token before the border, which may be in flight, still sees. So a row that decodes holds at most
    kept + 1 pages of the group.
    """

    def __init__(self, windows: Sequence[int | None], page_size: int) -> None:
        """`windows`: tokens that a query sees, itself included, by group; None: all."""
        self.windows = tuple(windows)
        self.page_size = page_size
        self.num_groups = len(self.windows)
        self.num_full = self.windows.count(None)
        assert None not in self.windows[self.num_full :], "groups without a window come first"
        seen = [window for window in self.windows if window is not None]
        self.num_windows = len(seen)
        self.kept = _column([-(-window // page_size) for window in seen])  # int32 [num_windows, 1], pages
        # Of a prefix that ends at a page border: the pages before it that its next token sees, int32 [num_windows, 1].
        self.needed = _column([-(-(window - 1) // page_size) for window in seen])

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
        return f"{room}, in {self.num_groups} cache groups, of which {self.num_windows} keep a window"


def _column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)
