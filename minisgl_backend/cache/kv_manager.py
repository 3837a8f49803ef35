"""Who may use which KV pages: leases, and the page table that they make up.

A lease belongs to a row; that row of the page table is its page list. The prefix cache, the free pages and the page
table are behind `KVManager`: nothing else reads or changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, IndexArray, Int32Array, Int64Array
from minisgl_backend.cache.changes import CacheChange
from minisgl_backend.cache.page_pool import PagePool
from minisgl_backend.cache.prefix_cache import NaiveCache, PrefixCache, PrefixMatch
from minisgl_backend.cache.radix_cache import RadixCache

# By the names of the option cache_type.
PREFIX_CACHES: Mapping[str, Callable[[int, bool], PrefixCache[Any]]] = {
    "radix": lambda page_size, record_changes: RadixCache(page_size, record_changes=record_changes),
    "naive": lambda page_size, record_changes: NaiveCache(),
}


class PageLease:
    """The right of one row to its pages. The first `num_shared` belong to the prefix cache and are pinned there; the
    others are this row's alone."""

    __slots__ = ("num_shared", "pin", "released", "row", "salt")

    def __init__(self, row: int, pin: Any, num_shared: int, salt: bytes) -> None:
        self.row = row
        self.pin = pin  # of the prefix cache
        self.salt = salt  # of what is published
        self.num_shared = num_shared
        self.released = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Pages of a row that were exchanged for equal ones of the prefix cache. `old` is the caller's to `free`, once no
    step that was planned before still reads it."""

    columns: Int32Array  # [num_swapped]
    old: Int32Array  # [num_swapped]
    new: Int32Array  # [num_swapped]


class KVManager:
    """Issues, extends and takes back leases. When the pool is empty it evicts from the prefix cache."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        cache_type: str,
        *,
        record_changes: bool = False,
    ) -> None:
        """`record_changes`: of the prefix cache, for `take_cache_changes`."""
        self.page_size = page_size
        self.version = 0  # one more whenever pages become available: until then what did not fit does not fit
        self._pool = PagePool(num_pages)
        self._cache = PREFIX_CACHES[cache_type](page_size, record_changes)
        self._table: Int32Array = np.zeros((max_rows, max_pages_per_row), dtype=np.int32)
        self._held = np.zeros(max_rows, dtype=np.int32)  # pages of each row
        self.covered = np.zeros(max_rows, dtype=np.int32)  # and the tokens that they have room for; for others to read
        self._matched = np.zeros(max_rows, dtype=np.int32)  # of these, what the prefix cache supplied at first

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Pages that only the prefix cache keeps."""
        return self._cache.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now: free and evictable ones."""
        return self._pool.num_free + self._cache.num_evictable

    @property
    def keeps_prefixes(self) -> bool:
        """Whether what is published outlives its lease."""
        return self._cache.keeps_prefixes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def cached_tokens(self, token_ids: Int32Array, salt: str | None = None) -> int:
        """Tokens that `match` would find; changes nothing, not even the eviction order."""
        return self._cache.peek(token_ids, salt.encode() if salt else b"") * self.page_size

    def match(self, token_ids: Int32Array, salt: str | None = None) -> PrefixMatch[Any]:
        """The longest prefix of `token_ids` in whole pages that was published with this salt, pinned until `acquire` or
        `unmatch`."""
        return self._cache.match(token_ids, salt.encode() if salt else b"")

    def unmatch(self, match: PrefixMatch[Any]) -> None:
        """Ends the pin of a match of which no lease was made."""
        self._cache.unpin(match.pin)

    def acquire(self, row: int, match: PrefixMatch[Any], num_tokens: int) -> PageLease:
        """A lease for a free row that covers `num_tokens`; takes over the match's pin.

        The caller has checked that `pages_for(num_tokens) - len(match.pages) <= num_available`.
        """
        assert self._held[row] == 0, "a row has one lease at a time"
        num_shared, count = len(match.pages), self.pages_for(num_tokens)
        self._table[row, :num_shared] = match.pages
        self._table[row, num_shared:count] = self._take(count - num_shared)
        self._held[row], self._matched[row], self.covered[row] = count, num_shared, count * self.page_size
        return PageLease(row, match.pin, num_shared, match.salt)

    def extend(self, rows: IndexArray) -> tuple[Int32Array, Int32Array]:
        """One more page for each of these rows (no row twice): their columns of the page table, and the pages; int32
        [num_rows] each. The caller has checked that `len(rows) <= num_available`."""
        pages = self._take(len(rows))
        columns = self._held[rows]
        self._table[rows, columns] = pages
        self._held[rows] = columns + 1
        self.covered[rows] += self.page_size
        return columns, pages

    def publish(self, lease: PageLease, token_ids: Int32Array) -> Swap | None:
        """Gives the full pages of `token_ids` (the row's tokens from its first one on, all computed) to the prefix
        cache and pins them there. Where the cache knew the tokens, the row changes over to its pages."""
        self._refuse_released(lease)
        count = len(token_ids) // self.page_size
        first = lease.num_shared
        if count <= first:
            return None
        self.version += 1  # of those who wait, some may share these pages now
        own = self._table[lease.row, first:count]
        tokens = token_ids[first * self.page_size : count * self.page_size]
        kept = self._cache.extend(lease.pin, tokens, own, lease.salt)
        lease.pin = kept.pin
        lease.num_shared = first + len(kept.pages)
        own = own[: len(kept.pages)]
        differs = np.flatnonzero(own != kept.pages)
        if not len(differs):
            return None
        swap = Swap((first + differs).astype(np.int32), own[differs], kept.pages[differs])
        own[differs] = swap.new  # a view: this writes the page table
        return swap

    def free(self, pages: Int32Array) -> None:
        """Takes back swapped pages, which no step in flight reads any more."""
        self._pool.give_back(pages)
        self.version += 1

    def release(self, lease: PageLease, token_ids: Int32Array = NO_INT32) -> Int32Array:
        """Ends a lease; the full pages of `token_ids` (computed tokens from the row's first one on) stay known to the
        prefix cache. Returns the others, which are free now, int32 [num_freed].

        Raises RuntimeError for a lease that has ended already.
        """
        self._refuse_released(lease)
        swap = self.publish(lease, token_ids)
        if swap is not None:
            self._pool.give_back(swap.old)
        own = self._table[lease.row, lease.num_shared : self._held[lease.row]].copy()
        self._pool.give_back(own)
        self._cache.unpin(lease.pin)
        self._held[lease.row] = self._matched[lease.row] = self.covered[lease.row] = 0
        lease.released = True
        self.version += 1
        return own

    def take_cache_changes(self) -> list[CacheChange]:
        """What the prefix cache has stored and removed since the last call, in order, where that is recorded."""
        return self._cache.take_changes()

    def pages_of(self, lease: PageLease) -> Int32Array:
        """All pages of a lease in order, int32 [num_pages]; a view of the page table."""
        return self._table[lease.row, : self._held[lease.row]]

    def num_private(self, lease: PageLease) -> int:
        """Pages of this lease alone; at least these become available when it ends."""
        return int(self._held[lease.row]) - lease.num_shared

    def freed_pages(self, rows: IndexArray) -> Int64Array:
        """Pages that become available when each of these rows ends, estimated: all but those that were cached when it
        was admitted; int64 [num_rows]."""
        return (self._held[rows] - self._matched[rows]).astype(np.int64)

    def check(self, leases: Iterable[PageLease], in_passing: Int32Array = NO_INT32) -> None:
        """Raises AssertionError unless each page has exactly one owner.

        Args:
            leases: all that are out.
            in_passing: pages that were swapped out and not given back yet.
        """
        leases = list(leases)
        self._pool.check()
        self._cache.check([lease.pin for lease in leases])
        assert len({lease.row for lease in leases}) == len(leases), "two leases share a row"
        assert (self.covered == self._held * self.page_size).all(), "a row's pages and its room disagree"
        assert int((self._held > 0).sum()) == sum(1 for one in leases if self._held[one.row]), "pages without a lease"
        owned = [self._pool.free_pages(), self._cache.pages(), in_passing]
        cached = set(self._cache.pages().tolist())
        for lease in leases:
            assert not lease.released, "a lease that has ended is still in use"
            pages = self.pages_of(lease)
            owned.append(pages[lease.num_shared :])
            assert cached.issuperset(pages[: lease.num_shared].tolist()), "a shared page is not in the prefix cache"
        everywhere = np.concatenate(owned)
        assert len(everywhere) == self.num_pages, "free + cached + leased differs from all pages"
        assert len(np.unique(everywhere)) == self.num_pages, "a page has two owners"

    def _take(self, count: int) -> Int32Array:
        missing = count - self._pool.num_free
        if missing > 0:
            self._pool.give_back(self._cache.evict(missing))
        return self._pool.take(count)

    @staticmethod
    def _refuse_released(lease: PageLease) -> None:
        if lease.released:
            raise RuntimeError(f"the lease of row {lease.row} has ended already")
