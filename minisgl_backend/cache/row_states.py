"""The states of rows: each row's own slot, the page border up to which it stands for the row's tokens, and its folds.

A row keeps the state behind a page border; what its later tokens add is kept beside it, on the device, until a fold
takes them into the state at a later border. A forward pass never changes a state, so that a step may be repeated and
drafts may be wrong. A state that the cache keeps is never folded into: the row goes on in another slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from minisgl_backend.arrays import IndexArray, Int32Array
from minisgl_backend.cache.lease import PageLease
from minisgl_backend.cache.prefix_cache import PrefixCache, PrefixMatch
from minisgl_backend.cache.state_slots import PROVED, SUPERSEDED, UNPROVED, StateSlots


class Folds(NamedTuple):
    """Rows whose state moves on to a later border; [num_folds] each, as in `StepPlan`."""

    rows: Int32Array
    sources: Int32Array
    targets: Int32Array
    borders: Int32Array


class RowStates:
    """Only `KVManager` and the planner use it. Borders are tokens, multiples of a page."""

    def __init__(self, slots: StateSlots, cache: PrefixCache[Any], page_size: int, max_rows: int) -> None:
        self._slots = slots
        self._cache = cache
        self._page_size = page_size
        self._slot = np.zeros(max_rows, dtype=np.int32)  # each row's own; 0: none
        self._border = np.zeros(max_rows, dtype=np.int32)
        self._room = np.zeros(max_rows, dtype=np.int32)  # tokens after which a row's next entry asks for a fold
        self._source = np.zeros(max_rows, dtype=np.int32)  # read by its first chunk, pinned until this is committed
        self._ordered: dict[int, list[int]] = {}  # by row: slots of states that chunks in flight write

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def version(self) -> int:
        """Until it changes, what did not `fit` does not fit."""
        return self._slots.version

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_evictable(self) -> int:
        """Slots of states that are in the prefix cache and that no row uses."""
        return self._slots.num_evictable

    def border_of(self, num_tokens: int) -> int:
        """The page border up to which a slot stands for a prompt of so many tokens."""
        return num_tokens // self._page_size * self._page_size

    def fit(self, num_rows: int = 1) -> bool:
        """Whether so many rows can get a slot while each running row keeps one for its next fold."""
        return self._slots.num_available >= num_rows

    def unmatch(self, match: PrefixMatch[Any]) -> None:
        """Unpins the state of a match."""
        if match.state:
            self._slots.unpin(match.state)

    def acquire(self, row: int, match: PrefixMatch[Any]) -> None:
        """Gives a row a slot, and takes over the match's pin. The caller has checked `fit`."""
        if match.state:
            self._slots.note_hit(match.state)
        slot = self._take()
        assert slot, "a row is admitted when there is a slot"
        self._slots.own(slot)
        self._slot[row], self._source[row] = slot, match.state
        self._advance(row, match.num_pages * self._page_size)

    def slots_of(self, row: int) -> tuple[int, int]:
        """Which slot the row's first chunk reads, 0 for none, and its own."""
        return int(self._source[row]), int(self._slot[row])

    def plan_chunk(self, row: int, end: int, borders: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """A chunk of the row's prompt is planned up to `end`. Returns which of the states at these borders, ascending
        and with what each is worth, it is to leave in which slots: those for which there is one without evicting what
        prompts have used, and for those that are worth least one that is free."""
        self._advance(row, self.border_of(end))
        found = []
        for border, worth in borders:
            if worth == SUPERSEDED and not self._slots.num_free:
                continue
            if not self.fit() or not (slot := self._take(proved=False)):
                break
            self._slots.pin(slot)
            self._ordered.setdefault(row, []).append(slot)
            found.append((border, slot))
        return tuple(found)

    def note_computed(self, row: int) -> None:
        """A chunk of the row has been committed: what its first one reads may be evicted."""
        if self._source[row]:
            self._slots.unpin(int(self._source[row]))
            self._source[row] = 0

    def keep(self, lease: PageLease, border: int, slot: int, worth: int) -> None:
        """Adds a state that a chunk has left in `slot` to the prefix cache; the pages before it have been published."""
        self._ordered[lease.row].remove(slot)
        self._keep(lease, border, slot, worth)
        self._slots.unpin(slot)

    def keep_own(self, lease: PageLease, worth: int = UNPROVED) -> None:
        """Adds the row's own state to the prefix cache; the pages before it have been published."""
        row = lease.row
        slot, border = int(self._slot[row]), int(self._border[row])
        if border:
            self._keep(lease, border, slot, worth)

    def fold(self, rows: IndexArray, lengths: Int32Array) -> Folds | None:
        """Moves the state of each of these rows to the page border before its next entry, where that is a later one.

        rows: no row twice; lengths: tokens in the cache after that entry, [num_rows]; all tokens before it are known.
        Returns what the device has to do; None: nothing.
        """
        due = lengths > self._room.take(rows)
        if True not in due:
            return None
        rows, lengths = rows[due], lengths[due]
        borders = (lengths - 1) // np.int32(self._page_size) * np.int32(self._page_size)
        sources = self._slot[rows]
        targets = sources.copy()
        for at in (cached := self._slots.is_cached[sources].nonzero()[0].tolist()):
            targets[at] = self._successor(int(sources[at]))
        # Not before: folds run at once, and what one reads must be no other's target.
        for at in cached:
            if targets[at] != sources[at]:
                self._slots.disown(int(sources[at]))
        self._slot[rows], self._border[rows] = targets, borders
        self._room[rows] = borders + np.int32(self._page_size)
        return Folds(rows.astype(np.int32), sources, targets, borders)

    def release(self, lease: PageLease, num_tokens: int, *, resumes: bool) -> None:
        """A row ends, of which so many tokens from the first one on are valid; their pages have been published. The
        prefix cache keeps its state. `resumes`: the sequence will come back for it."""
        row = lease.row
        self.note_computed(row)
        if num_tokens >= self._border[row]:
            self.keep_own(lease, PROVED if resumes else UNPROVED)
        self._slots.disown(int(self._slot[row]))
        for slot in self._ordered.pop(row, ()):
            self._slots.unpin(slot)
        self._slot[row] = self._border[row] = self._room[row] = 0

    def check(self, leases: Iterable[PageLease]) -> None:
        """Raises AssertionError unless each slot has exactly one place and each lease a row with one."""
        rows = [lease.row for lease in leases]
        assert sorted(rows) == np.flatnonzero(self._slot).tolist(), "a row without a state, or a state without a row"
        assert not (self._border % self._page_size).any(), "a border within a page"
        assert (self._room[rows] == self._border[rows] + self._page_size).all(), "a row's border and its room disagree"
        assert self._ordered.keys() <= set(rows), "states are left for a row that has ended"
        ordered = [slot for slots in self._ordered.values() for slot in slots]
        self._slots.check_users(self._slot[rows].tolist(), self._source[self._source > 0].tolist(), ordered)

    def _advance(self, row: int, border: int) -> None:
        self._border[row], self._room[row] = border, border + self._page_size

    def _keep(self, lease: PageLease, border: int, slot: int, worth: int) -> None:
        behind = lease.num_shared - border // self._page_size
        if behind >= 0:
            self._cache.keep_state(lease.pin, behind, slot, worth)

    def _successor(self, slot: int) -> int:
        """The slot that a row folds into whose own one is cached: another, or the same, which is not cached then."""
        slots = self._slots
        if slots.is_contended(slot) or slots.num_available > 0:
            target = self._take()
            assert target, "admission has left a slot for the fold of a row whose state others read"
            slots.own(target)
            return target
        self._cache.drop_state(slot)
        return slot

    def _take(self, *, proved: bool = True) -> int:
        """A slot, evicted where none is free; 0: there is none."""
        if not self._slots.num_free and not self._cache.evict_state(proved=proved):
            return 0
        return self._slots.take()
