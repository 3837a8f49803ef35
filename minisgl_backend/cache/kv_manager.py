"""Who may use which pages: leases, and the page table that they make up.

A lease belongs to a row; that row of the page table is its page list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_backend.cache.page_pool import PagePool
from minisgl_backend.cache.prefix_cache import NO_PAGES, NaiveCache, PrefixCache, PrefixMatch
from minisgl_backend.cache.radix_cache import RadixCache

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]


class PageLease:
    """The right of one row to its pages. The first `num_shared` belong to the prefix cache and are pinned there; the
    others are this row's alone."""

    __slots__ = ("num_shared", "pin", "released", "row")

    def __init__(self, row: int, pin: Any, num_shared: int) -> None:
        self.row = row
        self.pin = pin  # of the prefix cache
        self.num_shared = num_shared
        self.released = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Pages of a row that were exchanged for equal ones of the prefix cache. `old` is the caller's to give back,
    once nothing that was planned before still reads it."""

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
        """`record_changes`: of the prefix cache, for its `take_changes`."""
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.cache: PrefixCache[Any] = (
            RadixCache(page_size, record_changes=record_changes) if cache_type == "radix" else NaiveCache()
        )
        self.table: Int32Array = np.zeros((max_rows, max_pages_per_row), dtype=np.int32)
        self.held = np.zeros(max_rows, dtype=np.int32)  # pages of each row
        self.unsound: list[Int32Array] = []  # pages that the next step sets to zero before it uses them

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now: free ones and those that only the prefix cache keeps."""
        return self.pool.num_free + self.cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def acquire(self, row: int, match: PrefixMatch[Any], num_tokens: int) -> PageLease:
        """A lease for a free row that covers `num_tokens`; takes over the match's pin.

        The caller has checked that `pages_for(num_tokens) - len(match.pages) <= num_available`.
        """
        assert self.held[row] == 0, "a row has one lease at a time"
        num_shared, count = len(match.pages), self.pages_for(num_tokens)
        self.table[row, :num_shared] = match.pages
        self.table[row, num_shared:count] = self._take(count - num_shared)
        self.held[row] = count
        return PageLease(row, match.pin, num_shared)

    def extend(self, rows: IndexArray) -> Int32Array:
        """One more page for each of these rows (no row twice), int32 [num_rows]. The caller has checked that
        `len(rows) <= num_available`."""
        pages = self._take(len(rows))
        held = self.held[rows]
        self.table[rows, held] = pages
        self.held[rows] = held + 1
        return pages

    def publish(self, lease: PageLease, token_ids: Int32Array) -> Swap | None:
        """Gives the full pages of `token_ids` (the row's tokens from its first one on, all computed) to the prefix
        cache and pins them there. Where the cache knew the tokens, the row changes over to its pages."""
        self._refuse_released(lease)
        count = len(token_ids) // self.page_size
        first = lease.num_shared
        if count <= first:
            return None
        own = self.table[lease.row, first:count]
        kept = self.cache.extend(lease.pin, token_ids[first * self.page_size : count * self.page_size], own)
        lease.pin = kept.pin
        lease.num_shared = first + len(kept.pages)
        own = own[: len(kept.pages)]
        differs = np.flatnonzero(own != kept.pages)
        if not len(differs):
            return None
        swap = Swap((first + differs).astype(np.int32), own[differs], kept.pages[differs])
        own[differs] = swap.new  # a view: this writes the page table
        return swap

    def release(self, lease: PageLease, token_ids: Int32Array = NO_PAGES, *, sound: bool = True) -> None:
        """Ends a lease; the full pages of `token_ids` (computed tokens from the row's first one on) stay known to the
        prefix cache. Not `sound`: the row's own pages may hold NaN, and must be set to zero.

        Raises RuntimeError for a lease that has ended already.
        """
        self._refuse_released(lease)
        swap = self.publish(lease, token_ids)
        if swap is not None:
            self.pool.give_back(swap.old)
        own = self.table[lease.row, lease.num_shared : self.held[lease.row]]
        self.pool.give_back(own)
        if not sound:
            self.add_unsound(own)
        self.cache.unpin(lease.pin)
        self.held[lease.row] = 0
        lease.released = True

    def add_unsound(self, pages: Int32Array) -> None:
        """The next step must set these pages to zero before it uses them. They may be free or newly handed out."""
        self.unsound.append(pages.copy())

    def take_unsound(self) -> Int32Array:
        """Pages that must be set to zero now, int32 [num_pages], each once."""
        if not self.unsound:
            return NO_PAGES
        pages, self.unsound = self.unsound, []
        return np.unique(np.concatenate(pages))

    def pages_of(self, lease: PageLease) -> Int32Array:
        """All pages of a lease in order, int32 [num_pages]; a view of the page table."""
        return self.table[lease.row, : self.held[lease.row]]

    def num_private(self, lease: PageLease) -> int:
        """Pages that nobody else can use; at least these become available when the lease ends."""
        return int(self.held[lease.row]) - lease.num_shared

    def check(self, leases: Iterable[PageLease], in_passing: Int32Array = NO_PAGES) -> None:
        """Raises AssertionError unless each page is in exactly one place.

        Args:
            leases: all that are out.
            in_passing: pages that were swapped out and not given back yet.
        """
        leases = list(leases)
        self.pool.check()
        self.cache.check([lease.pin for lease in leases])
        assert len({lease.row for lease in leases}) == len(leases), "two leases share a row"
        assert int((self.held > 0).sum()) == sum(1 for lease in leases if self.held[lease.row]), "pages without a lease"
        places = [self.pool.free_pages(), self.cache.pages(), in_passing]
        cached = set(self.cache.pages().tolist())
        for lease in leases:
            assert not lease.released, "a lease that has ended is still in use"
            pages = self.pages_of(lease)
            places.append(pages[lease.num_shared :])
            assert cached.issuperset(pages[: lease.num_shared].tolist()), "a shared page is not in the prefix cache"
        everywhere = np.concatenate(places)
        assert len(everywhere) == self.pool.num_pages, "free + cached + leased differs from all pages"
        assert len(np.unique(everywhere)) == self.pool.num_pages, "a page is in two places"

    def _take(self, count: int) -> Int32Array:
        missing = count - self.pool.num_free
        if missing > 0:
            self.pool.give_back(self.cache.evict(missing))
        return self.pool.take(count)

    @staticmethod
    def _refuse_released(lease: PageLease) -> None:
        if lease.released:
            raise RuntimeError(f"the lease of row {lease.row} has ended already")
