"""What a row keeps of its pages: all of them, or those that its last tokens see.

Layers that keep tokens alike are a cache group, and each group has a page table of its own over one pool of equal pages
(see `kv.groups` for how layers are put into groups). Of a group with a window a row keeps the pages that its next
token, and what is being computed, may see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import Int32Array

FULL: tuple[int | None, ...] = (None,)  # the windows of a model whose layers all see everything


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
        return f"room for {count} sequence{'' if count == 1 else 's'} of {longest} tokens"


def _column(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32).reshape(-1, 1)
