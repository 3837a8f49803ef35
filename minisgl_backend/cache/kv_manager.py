"""KV page management: leases of pages, and the page table that they make up.

A lease belongs to a row; that row of the page table is its list of pages. Only `KVManager` reads and changes the prefix
cache, the free pages and the page table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, IdArray, IndexArray, Int32Array, Int64Array
from minisgl_backend.cache.changes import CacheChange
from minisgl_backend.cache.lease import PageLease, Swap, TableEntries
from minisgl_backend.cache.page_pool import PagePool
from minisgl_backend.cache.prefix_cache import NaiveCache, PrefixCache, PrefixMatch
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.row_states import RowStates
from minisgl_backend.cache.state_slots import StateSlots
from minisgl_backend.kv.groups import CacheGroups

# By the values of the option cache_type; each gets the groups, the number of pages, whether changes are recorded, and
# the slots of a model with states.
PREFIX_CACHES: Mapping[str, Callable[[CacheGroups, int, bool, StateSlots | None], PrefixCache[Any]]] = {
    "radix": lambda groups, num_pages, record_changes, states: RadixCache(
        groups.page_size, groups=groups, num_pages=num_pages, record_changes=record_changes, states=states
    ),
    "naive": lambda groups, num_pages, record_changes, states: NaiveCache(groups.num_pages),
}


class KVManager:
    """Issues, extends and takes back leases. When the pool is empty it evicts from the prefix cache."""

    def __init__(
        self,
        num_pages: int,
        groups: CacheGroups,
        max_rows: int,
        max_pages_per_row: int,
        cache_type: str,
        *,
        record_changes: bool = False,
        num_state_slots: int = 0,
    ) -> None:
        """`record_changes`: record the prefix cache's changes for `take_cache_changes`. `num_state_slots`: of a model
        with states."""
        self.groups = groups
        self.page_size = groups.page_size
        self.keeps_all = groups.num_windows == 0  # rows keep all their pages until they end
        self.version = 0  # incremented whenever pages become available: until then, what did not fit does not fit
        self._num_full, self._num_windows = groups.num_full, groups.num_windows
        self._pool = PagePool(num_pages)
        slots = StateSlots(num_state_slots) if num_state_slots else None
        self._cache = PREFIX_CACHES[cache_type](groups, num_pages, record_changes, slots)
        # None: a model without states.
        self.states = None if slots is None else RowStates(slots, self._cache, groups.page_size, max_rows)
        # [num_groups, max_rows, max_pages_per_row]; 0 where a group with a window has no page
        self._table: Int32Array = np.zeros((groups.num_pages, max_rows, max_pages_per_row), dtype=np.int32)
        self._only = self._table[0] if groups.num_pages == 1 else None  # indexed faster than with an axis of length 1
        # Columns up to which each row has pages of all groups, [max_rows]. While its prompt is computed, groups without
        # a window have pages up to `_reserved`, all that the prompt needs; groups with one get them chunk by chunk.
        self._held = np.zeros(max_rows, dtype=np.int32)
        self._reserved = np.zeros(max_rows, dtype=np.int32)
        self.covered = np.zeros(max_rows, dtype=np.int32)  # tokens that `_held` has room for; others only read it
        self._matched = np.zeros(max_rows, dtype=np.int32)  # columns that the prefix cache supplied at admission
        self._shared = np.zeros(max_rows, dtype=np.int32)  # columns that belong to the cache now, as in the leases
        self._first = np.zeros((self._num_windows, max_rows), dtype=np.int32)  # first column not given back

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Pages that are in the prefix cache and that no row uses."""
        return self._cache.num_evictable

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: free and evictable ones."""
        return self._pool.num_free + self._cache.num_evictable

    @property
    def keeps_prefixes(self) -> bool:
        """Whether published pages outlive their lease."""
        return self._cache.keeps_prefixes

    def pages_for(self, num_tokens: int) -> int:
        """Pages of a group without a window for that many tokens."""
        return -(-num_tokens // self.page_size)

    def cached_tokens(self, token_ids: IdArray, salt: bytes = b"") -> int:
        """Tokens that `match` would find; changes nothing, not even the eviction order."""
        return self._cache.peek(token_ids, salt) * self.page_size

    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[Any]:
        """The longest prefix of `token_ids` in whole pages that was published with this salt (`cache.salt`). It is
        pinned until `acquire` or `unmatch`."""
        return self._cache.match(token_ids, salt)

    def unmatch(self, match: PrefixMatch[Any]) -> None:
        """Unpins a match that no lease was made of."""
        self._unref(match.pages[self._num_full :])
        if self.states is not None:
            self.states.unmatch(match)
        self._cache.unpin(match.pin)

    @property
    def num_extendable(self) -> int:
        """Rows that can get one more column with the available pages."""
        return self.num_available // self.groups.num_pages

    def pages_to_take(self, match: PrefixMatch[Any], num_tokens: int, chunk_end: int) -> int:
        """Number of pages that `acquire` takes."""
        cached = match.num_pages
        pages = self._num_full * (self.pages_for(num_tokens) - cached)
        return pages + self._num_windows * (self.pages_for(chunk_end) - cached)

    def pages_to_start(self, match: PrefixMatch[Any], num_tokens: int, chunk_end: int) -> int:
        """Number of pages that a prompt needs until it is computed, in chunks as long as the first; never less than
        `acquire` takes."""
        left = self.pages_for(num_tokens) - self.pages_for(chunk_end)
        return self.pages_to_take(match, num_tokens, chunk_end) + self.groups.window_pages(left)

    def max_tokens_at_start(self, match: PrefixMatch[Any], num_tokens: int) -> int:
        """The token up to which a prompt's first chunk can go with the available pages; the end of the cached prefix
        where they do not suffice."""
        if self.keeps_all:
            return num_tokens
        left = self.num_available - self._num_full * (self.pages_for(num_tokens) - match.num_pages)
        return (match.num_pages + max(left, 0) // self._num_windows) * self.page_size

    def acquire(self, row: int, match: PrefixMatch[Any], num_tokens: int, chunk_end: int | None = None) -> PageLease:
        """Returns a lease of `num_tokens` for a free row; takes over the match's pin.

        Groups with windows get pages for the first `chunk_end` tokens only (None: for all), and more by `grow`. The
        caller has checked that `pages_to_take <= num_available`.
        """
        assert self._held[row] == 0, "a row has one lease at a time"
        shared, count = match.num_pages, self.pages_for(num_tokens)
        table = self._table[:, row]
        if shared:
            table[:, :shared] = match.pages
        num_full, held = self._num_full, count
        if num_full:
            table[:num_full, shared:count] = self._take(num_full * (count - shared)).reshape(num_full, -1)
        if not self.keeps_all:
            held = count if chunk_end is None else self.pages_for(chunk_end)
            num_windows = self._num_windows
            table[num_full:, shared:held] = self._take(num_windows * (held - shared)).reshape(num_windows, -1)
            self._reserved[row] = count
            self._first[:, row] = np.maximum(self.groups.first_needed(np.full(1, shared, np.int32))[:, 0], 0)
        self._held[row], self._matched[row], self.covered[row] = held, shared, held * self.page_size
        self._shared[row] = shared
        if self.states is not None:
            self.states.acquire(row, match)
        return PageLease(row, match.pin, shared, match.salt)

    def max_tokens_now(self, row: int) -> int:
        """Tokens up to which `grow` can go with the available pages."""
        columns = 0 if self.keeps_all else self.num_available // self._num_windows
        return int(self.covered[row]) + columns * self.page_size

    def grow(self, row: int, num_tokens: int) -> TableEntries | None:
        """Takes pages of groups with windows for the row's first `num_tokens`, at most `max_tokens_now`; None: it has
        them already."""
        held, count = int(self._held[row]), self.pages_for(num_tokens)
        if count <= held:
            return None
        pages = self._take(self._num_windows * (count - held))
        self._table[self._num_full :, row, held:count] = pages.reshape(self._num_windows, -1)
        self._held[row], self.covered[row] = count, count * self.page_size
        groups = np.arange(self._num_full, self.groups.num_pages, dtype=np.int32)
        columns = np.arange(held, count, dtype=np.int32)
        rows = np.full(len(pages), row, np.int32)
        return TableEntries(groups.repeat(len(columns)), rows, np.tile(columns, len(groups)), pages)

    def extend(self, rows: IndexArray) -> tuple[Int32Array, Int32Array]:
        """Takes one more page in each group for each of these rows (no row twice). Returns their columns of the page
        table, int32 [num_rows], and the pages, int32 [num_groups * num_rows], group by group. The caller has checked
        that `num_groups * len(rows) <= num_available`."""
        pages = self._take(self.groups.num_pages * len(rows))
        columns = self._held[rows]
        if self._only is not None:
            self._only[rows, columns] = pages
        else:
            axis = np.arange(self.groups.num_pages)[:, None]  # a slice here would be ten times slower
            self._table[axis, rows, columns] = pages.reshape(-1, len(rows))
        held = columns + 1
        self._held[rows], self.covered[rows] = held, held * self.page_size
        return columns, pages

    def shrink(self, rows: IndexArray, num_tokens: Int32Array) -> None:
        """Takes back these rows' pages after their first `num_tokens` tokens, [num_rows] each. None of these pages is
        published, and no step in flight includes the rows."""
        counts = -(-num_tokens // self.page_size)
        for which in np.flatnonzero(self._held[rows] > counts).tolist():
            row, count, held = rows[which], counts[which], self._held[rows[which]]
            self._pool.give_back(self._table[:, row, count:held].flatten())
            self._table[:, row, count:held] = 0
            self._held[row], self.covered[row] = count, count * self.page_size
            self.version += 1

    def free_out_of_window(self, rows: IndexArray, positions: Int32Array) -> TableEntries | None:
        """Gives back pages that no window shows to these rows' tokens from the column of `positions` on, or to the
        token before it. The caller ensures that no earlier token is in flight. Published pages stay cached.

        rows: no row twice; positions: [num_rows]. Returns the removed entries; None where there are none.
        """
        if self.keeps_all:
            return None
        first = self._first[:, rows]
        live = np.maximum(self.groups.first_kept(positions // np.int32(self.page_size)), first)
        groups, which = np.nonzero(live > first)
        if not len(groups):
            return None
        counts = (live - first)[groups, which]
        ends = np.cumsum(counts)
        column = np.repeat(first[groups, which] - (ends - counts), counts) + np.arange(ends[-1])
        group, row = np.repeat(groups + self._num_full, counts), np.repeat(rows[which], counts)
        pages = self._table[group, row, column]
        is_shared = column < self._shared[row]
        self._cache.unref(pages[is_shared])
        self._pool.give_back(pages[~is_shared])
        self._table[group, row, column] = 0
        self._first[:, rows] = live
        self.version += 1
        none = np.zeros(len(pages), dtype=np.int32)
        return TableEntries(group.astype(np.int32), row.astype(np.int32), column.astype(np.int32), none)

    def publish(self, lease: PageLease, token_ids: IdArray) -> Swap | None:
        """Adds the full pages of `token_ids` (the row's tokens from the first one on, all computed) to the prefix cache
        and pins them there. Where the cache had these tokens already, the row switches to the cache's pages."""
        lease.refuse_released()
        count = len(token_ids) // self.page_size
        first = lease.num_shared
        if count <= first:
            return None
        self.version += 1  # some waiting sequences may share these pages now
        own = self._table[:, lease.row, first:count]
        tokens = token_ids[first * self.page_size : count * self.page_size]
        kept = self._cache.extend(lease.pin, tokens, own, lease.salt)
        lease.share(kept.pin, first + kept.num_pages)
        self._shared[lease.row] = lease.num_shared
        if kept.pages is own:
            return None
        own = own[:, : kept.num_pages]
        differs = own != kept.pages
        if True not in differs:
            return None
        groups, columns = differs.nonzero()
        old, new = own[groups, columns], kept.pages[groups, columns]
        own[groups, columns] = new  # `own` is a view: this writes the page table
        rows = np.full(len(new), lease.row, dtype=np.int32)
        return Swap(TableEntries(groups.astype(np.int32), rows, (first + columns).astype(np.int32), new), old)

    def free(self, pages: Int32Array) -> None:
        """Takes back swapped pages, which no step in flight reads any more."""
        self._pool.give_back(pages)
        self.version += 1

    def release(self, lease: PageLease, token_ids: IdArray = NO_INT32, *, resumes: bool = False) -> Int32Array:
        """Ends a lease. The full pages of `token_ids` (computed tokens from the row's first one on) and their state
        stay in the prefix cache; `resumes`: the sequence will come back for them. Returns the other pages, which are
        free now, int32 [num_freed].

        Raises RuntimeError for a lease that has ended already.
        """
        lease.refuse_released()
        swap = self.publish(lease, token_ids)
        if swap is not None:
            self._pool.give_back(swap.old)
        if self.states is not None:
            self.states.release(lease, len(token_ids), resumes=resumes)
        row, pages = lease.row, self.pages_of(lease)
        own = pages[:, lease.num_shared :].flatten()
        if not self.keeps_all:
            own = own[own > 0]
            self._unref(pages[self._num_full :, : lease.num_shared])
            pages[:] = 0
            self._first[:, row] = self._reserved[row] = 0
        self._pool.give_back(own)
        self._cache.unpin(lease.pin)
        self._held[row] = self._matched[row] = self.covered[row] = self._shared[row] = 0
        lease.end()
        self.version += 1
        return own

    def take_cache_changes(self) -> list[CacheChange]:
        """What the prefix cache has stored and removed since the last call, in order, if changes are recorded."""
        return self._cache.take_changes()

    def pages_of(self, lease: PageLease) -> Int32Array:
        """All pages of a lease in order, int32 [num_groups, num_pages]; a view of the page table. 0: a group with a
        window has given the page back, or has not taken it yet."""
        return self._table[:, lease.row, : max(self._held[lease.row], self._reserved[lease.row])]

    def entries(self, groups: Int32Array, rows: Int32Array, columns: Int32Array) -> TableEntries:
        """The current values of these page-table entries; [num_entries] each."""
        return TableEntries(groups, rows, columns, self._table[groups, rows, columns])

    def num_exclusive(self, lease: PageLease) -> int:
        """Pages that belong to this lease alone; at least these become available when it ends."""
        return int(np.count_nonzero(self.pages_of(lease)[:, lease.num_shared :]))

    def freed_pages(self, rows: IndexArray) -> Int64Array:
        """Estimates the pages that become available when each of these rows ends: all but those that were cached at its
        admission; int64 [num_rows]."""
        held, matched = self._held[rows], self._matched[rows]
        if self.keeps_all:
            return (self._num_full * (held - matched)).astype(np.int64)
        live = np.maximum(held - np.maximum(self._first[:, rows], matched), 0).sum(axis=0)
        return (self._num_full * (np.maximum(held, self._reserved[rows]) - matched) + live).astype(np.int64)

    def window_growth(self, rows: IndexArray, lengths: Int64Array) -> int:
        """Pages of groups with windows that these rows will take until they have these `lengths`."""
        if self.keeps_all:
            return 0
        most = np.minimum(-(-lengths // self.page_size), self.groups.most_kept + 1)
        return int(np.maximum(most - (self._held[rows] - self._first[:, rows]), 0).sum())

    def check(self, leases: Iterable[PageLease], in_passing: Int32Array = NO_INT32) -> None:
        """Raises AssertionError unless each page has exactly one owner.

        Args:
            leases: all leases that have not ended.
            in_passing: pages that were swapped out and not given back yet.
        """
        leases = list(leases)
        self._pool.check()
        used = [self.pages_of(lease)[self._num_full :, : lease.num_shared].reshape(-1) for lease in leases]
        in_use = np.concatenate(used) if used else NO_INT32
        self._cache.check([lease.pin for lease in leases], in_use[in_use > 0])
        if self.states is not None:
            self.states.check(leases)
        assert len({lease.row for lease in leases}) == len(leases), "two leases share a row"
        assert (self.covered == self._held * self.page_size).all(), "a row's pages and its room disagree"
        assert int((self._held > 0).sum()) == sum(1 for one in leases if self._held[one.row]), "pages without a lease"
        owned = [self._pool.free_pages(), self._cache.pages(), in_passing]
        cached = set(self._cache.pages().tolist())
        for lease in leases:
            assert not lease.released, "a lease that has ended is still in use"
            assert lease.num_shared == self._shared[lease.row], "a lease and its row disagree"
            pages = self.pages_of(lease)
            assert (pages[: self._num_full] > 0).all(), "a group without a window has a hole"
            for first, held in zip(self._first[:, lease.row], pages[self._num_full :], strict=True):
                assert not held[:first].any(), "a page that was given back is in the page table"
                assert (held[first : self._held[lease.row]] > 0).all(), "a page that is needed is missing"
                assert not held[self._held[lease.row] :].any(), "a page that was not taken is in the page table"
            owned.append(pages[:, lease.num_shared :].reshape(-1))
            shared = pages[:, : lease.num_shared].reshape(-1)
            assert cached.issuperset(shared[shared > 0].tolist()), "a shared page is not in the prefix cache"
        everywhere = np.concatenate(owned)
        everywhere = everywhere[everywhere > 0]
        assert len(everywhere) == self.num_pages, "free + cached + leased differs from all pages"
        assert len(np.unique(everywhere)) == self.num_pages, "a page has two owners"

    def _unref(self, pages: Int32Array) -> None:
        if not self.keeps_all:
            self._cache.unref(pages[pages > 0])

    def _take(self, count: int) -> Int32Array:
        missing = count - self._pool.num_free
        if missing > 0:
            self._pool.give_back(self._cache.evict(missing))
        return self._pool.take(count)
