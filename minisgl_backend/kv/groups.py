"""Cache groups, whose layers share a page table, and what rows hold of each.

Layers that keep the same tokens are a cache group, and each group has a page table of its own over one pool of equal
pages: of a group whose layers see a window or a chunk, a row keeps the pages that its next token, and what is being
computed, may see. Layers of one kind, as many as there are, become one group or several, the last of which may be short
(vLLM's hybrid KV cache manager pads in the same way).

A page of the pool has a part for each layer of a group. Where layers of the groups differ in the bytes of a token, a
page holds fewer tokens of those with more: attention's pages, which are equally long everywhere, are then parts of the
pool's (vLLM's kernel blocks), and a row takes whole *columns*:

    layers with windows, 2 bytes a token   page 7, page 9   a column: two of the pool's pages, each one of attention's
    layers that see all, 1 byte a token    page 4           the same tokens: one of the pool's, two of attention's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.kv.kinds import FULL, CacheKind, Chunked, order

MOST_GROUPS = 8  # of a model: attention is planned for each of them in each step


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one page table. A column of it has `num_pages * split` of attention's pages, in all groups alike."""

    kind: CacheKind = FULL
    num_pages: int = 1  # pages of the pool in a column
    split: int = 1  # pages of attention in one of them


class ColumnLayout:
    """How the page tables of attention follow from the pages of a row's columns, which are listed group by group."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups = tuple(groups)
        self.num_groups = len(self.groups)
        self.kernel_pages = groups[0].num_pages * groups[0].split  # of attention in a column
        self.kinds = tuple(group.kind for group in groups for _ in range(group.num_pages))  # of a column's pages
        # By page of a column: its group, into how many pages of attention it is divided, and the place of the first.
        self._group = _of_pages(groups, [[index] * group.num_pages for index, group in enumerate(groups)])
        self._split = _of_pages(groups, [[group.split] * group.num_pages for group in groups])
        self._place = _of_pages(groups, [[page * group.split for page in range(group.num_pages)] for group in groups])

    def of_rows(self, page_size: int) -> CacheGroups:
        """What rows hold; `page_size`: of attention."""
        return CacheGroups(self.kinds, self.kernel_pages * page_size)

    def kernel_pages_for(self, num_tokens: int, page_size: int) -> int:
        """Pages of attention of the columns that hold so many tokens."""
        return -(-num_tokens // (page_size * self.kernel_pages)) * self.kernel_pages

    def kernel_entries(
        self, which: Int32Array, rows: Int32Array, columns: Int32Array, pages: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Entries of attention's page tables (groups, rows, columns, pages), sorted by group and column; from entries
        of rows' columns, where `which` numbers the pages of a column. All int32 [num_entries]; page 0 becomes 0."""
        counts = self._split[which]
        each = np.repeat(np.arange(len(which)), counts)
        part = np.arange(len(each), dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
        which, pages = which[each], pages[each]
        groups, places = self._group[which], columns[each] * np.int32(self.kernel_pages) + self._place[which] + part
        entries = groups, rows[each], places, pages * self._split[which] + part * (pages > 0)
        ranks = np.lexsort((places, groups))  # stable: later values of an entry stay behind earlier ones
        return tuple(values[ranks].astype(np.int32, copy=False) for values in entries)  # type: ignore[return-value]


def _of_pages(groups: Sequence[CacheGroup], values: list[list[int]]) -> Int32Array:
    return np.array([value for of_group in values for value in of_group], dtype=np.int32)


class CacheGroups:
    """The pages of a row's columns: of kinds that keep everything first, of those with chunks last.

    With a border before the next token, of a kind with a window a row keeps the pages before it that the token before
    the border, which may be in flight, still sees. So a row that decodes holds at most `most_kept` + 1 of them.
    """

    def __init__(self, kinds: Sequence[CacheKind], page_size: int) -> None:
        """`kinds`: of the pages of a column; `page_size`: tokens of a column."""
        self.kinds = tuple(kinds)
        self.page_size = page_size
        self.num_pages = len(self.kinds)  # of a column
        assert list(self.kinds) == sorted(self.kinds, key=order), "kinds come in this order"
        self.num_full = sum(kind.keeps_all for kind in self.kinds)
        self.num_windows = self.num_pages - self.num_full
        windows = self.kinds[self.num_full :]
        self._kept = [kept for kind in windows if (kept := kind.most_kept(page_size)) is not None]
        self.most_kept = np.array(self._kept, dtype=np.int32).reshape(-1, 1)  # [num_windows, 1]
        self._runs = [(kind, windows.index(kind), windows.count(kind)) for kind in dict.fromkeys(windows)]

    def first_kept(self, borders: Int32Array) -> Int32Array:
        """`CacheKind.first_kept` of the kinds that do not keep everything: [n] -> [num_windows, n]."""
        return self._by_kind(borders, [kind.first_kept(borders, self.page_size) for kind, _, _ in self._runs])

    def first_needed(self, borders: Int32Array) -> Int32Array:
        """Likewise `CacheKind.first_needed`."""
        return self._by_kind(borders, [kind.first_needed(borders, self.page_size) for kind, _, _ in self._runs])

    def _by_kind(self, borders: Int32Array, values: list[Int32Array]) -> Int32Array:
        if len(values) == 1:
            return np.broadcast_to(values[0], (self.num_windows, len(borders)))
        first = np.empty((self.num_windows, len(borders)), dtype=np.int32)
        for (_, start, count), of_kind in zip(self._runs, values, strict=True):
            first[start : start + count] = of_kind
        return first

    def pages_for(self, num_tokens: int) -> int:
        """Columns of that many tokens."""
        return -(-num_tokens // self.page_size)

    def pages_of_row(self, num_tokens: int) -> int:
        """Pages that a decoding row of `num_tokens` holds, at most."""
        columns = self.pages_for(num_tokens)
        return self.num_full * columns + self.window_pages(columns)

    def window_pages(self, num_columns: int) -> int:
        """Those of a decoding row with so many columns that are not of kinds that keep everything."""
        return sum(min(kept + 1, num_columns) for kept in self._kept)

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


def room_in(columns: ColumnLayout, page_size: int, num_pages: int, max_seq_len: int) -> str:
    """What a pool of `num_pages` holds, in words; `page_size`: of attention."""
    groups = columns.of_rows(page_size)
    longest = groups.max_length(num_pages, max_seq_len)
    count = num_pages // max(groups.pages_of_row(longest), 1)
    room = f"room for {count} sequence{'' if count == 1 else 's'} of {longest} tokens"
    if columns.num_groups == 1:
        return room
    kept = "a window or a chunk" if any(isinstance(kind, Chunked) for kind in groups.kinds) else "a window"
    keeping = sum(not group.kind.keeps_all for group in columns.groups)
    return f"{room}, in {columns.num_groups} cache groups, of which {keeping} keep {kept}"
