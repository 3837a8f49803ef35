"""Slots of recurrent states: which are free, which hold the state behind a cached prefix, and which are in use.

A slot holds what all layers with a state know after some tokens, a whole number of pages. Slots are a pool of their
own, beside the pages: the radix tree knows a state by its slot. Arrays are indexed by slot id; 0 is no slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.cache.page_pool import PagePool
from minisgl_backend.cache.radix_node import RadixNode

# How often a cached state has been the end of a match. Those that were passed by on the way to a deeper one, and that
# at most the same conversation has used, are evicted first; then those that nobody has used.
SUPERSEDED, UNPROVED = -1, 0
PROVED = 2  # from the start: what several prompts are known to share, and what a preempted sequence comes back to


class StateSlots:
    """A slot is free, cached, or its user's alone; a cached one may have users, too, and is then not evicted."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictable = 0  # cached and without a user
        self.version = 0  # incremented whenever `num_available` may have grown
        self._pool = PagePool(num_slots)
        self._nodes = np.empty(num_slots + 1, dtype=object)  # the node of a cached state
        self.is_cached = np.zeros(num_slots + 1, dtype=np.bool_)  # others only read it
        self._is_owned = np.zeros(num_slots + 1, dtype=np.bool_)  # a row's own, which its next fold replaces
        self._users = np.zeros(num_slots + 1, dtype=np.int32)  # the row that owns it, and matches that read it
        self._hits = np.zeros(num_slots + 1, dtype=np.int32)
        self._used_at = np.zeros(num_slots + 1, dtype=np.int64)
        self._tick = 0

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_contended(self) -> int:
        """Cached slots that are a row's own while matches read them: that row's next fold needs another slot."""
        return int(np.count_nonzero(self._is_owned & (self._users > 1)))

    @property
    def num_available(self) -> int:
        """Slots that can be had now without keeping a row from its next fold."""
        return self.num_free + self.num_evictable - self.num_contended

    def is_contended(self, slot: int) -> bool:
        return bool(self._is_owned[slot]) and int(self._users[slot]) > 1

    def prefix_end(self, path: Sequence[RadixNode], most: int) -> int:
        """Columns of the longest prefix of a path, at most `most`, behind which there is a state."""
        found = np.flatnonzero(np.concatenate([node.states for node in path])[:most])
        return int(found[-1]) + 1 if len(found) else 0

    def take(self) -> int:
        """A free slot; the caller has checked that there is one."""
        return int(self._pool.take(1)[0])

    def give_back(self, slots: Int32Array) -> None:
        """These slots, int32 [num_slots], are free: neither cached nor in use."""
        self._pool.give_back(slots)

    def own(self, slot: int) -> None:
        """A row uses this slot as its own."""
        self._is_owned[slot] = True
        self.pin(slot)

    def disown(self, slot: int) -> None:
        """The opposite of `own`. A slot that is neither cached nor used by others is free."""
        self._is_owned[slot] = False
        self.unpin(slot)

    def pin(self, slot: int) -> None:
        self.num_evictable -= bool(self.is_cached[slot]) and not self._users[slot]
        self._users[slot] += 1

    def pin_end(self, path: Sequence[RadixNode], end: RadixNode) -> int:
        """Pins the state at the end of a match, behind the last column of `end`, and returns its slot. `path`: the
        nodes before."""
        for node in path:
            self._note_passed(node.states)
        self._note_passed(end.states[:-1])
        slot = int(end.states[-1])
        self.pin(slot)
        return slot

    def unpin(self, slot: int) -> None:
        """Ends one use of a slot. A slot that is neither cached nor used by others is free."""
        assert self._users[slot] > 0, "a use ends once"
        self._users[slot] -= 1
        self.version += self._users[slot] <= self._is_owned[slot]  # the last use, or the last but the owner's
        if self._users[slot]:
            return
        if self.is_cached[slot]:
            self.num_evictable += 1
        else:
            self._pool.give_back(np.array([slot], dtype=np.int32))

    def note_hit(self, slot: int) -> None:
        """A prompt's match has ended at this cached state."""
        self._tick += 1
        self._used_at[slot] = self._tick
        self._hits[slot] = max(int(self._hits[slot]), UNPROVED) + 1

    def prove(self, slot: int) -> None:
        """This cached state is what several prompts share, or what a preempted sequence comes back to."""
        self._tick += 1
        self._hits[slot], self._used_at[slot] = max(int(self._hits[slot]), PROVED), self._tick

    def add(self, slot: int, node: RadixNode, hits: int) -> None:
        """The slot's state, which a row or the caller has taken, is in the tree now."""
        self._tick += 1
        self._nodes[slot], self._hits[slot], self._used_at[slot] = node, hits, self._tick
        self.is_cached[slot] = True
        self.num_evictable += not self._users[slot]

    def move(self, node: RadixNode) -> None:
        """These states of a node were another's."""
        self._nodes[node.states[node.states > 0]] = node

    def forget(self, slot: int) -> RadixNode:
        """A cached state leaves the tree; returns its node. The slot is free, or its users' alone."""
        node: RadixNode = self._nodes[slot]
        self.is_cached[slot], self._nodes[slot] = False, None
        if not self._users[slot]:
            self.num_evictable -= 1
            self._pool.give_back(np.array([slot], dtype=np.int32))
        return node

    def forget_all(self, slots: Int32Array) -> None:
        """Columns with these states, int32 [num_columns], leave the tree; 0: no state there."""
        for slot in slots[slots > 0].tolist():
            self.forget(slot)

    def next_evicted(self, *, proved: bool) -> int:
        """The cached state to evict next; 0: there is none. `proved`: also one that prompts have used."""
        idle = np.flatnonzero(self.is_cached & (self._users == 0))
        hits = self._hits[idle]
        candidates = idle[hits <= SUPERSEDED]
        if not len(candidates):
            # What prompts have used keeps half of the cached slots against what nobody has used yet.
            unused = idle[hits == UNPROVED]
            candidates = unused if not proved or 2 * len(unused) >= len(idle) else idle[hits > UNPROVED]
        return int(candidates[self._used_at[candidates].argmin()]) if len(candidates) else 0

    def _note_passed(self, slots: Int32Array) -> None:
        """A match goes beyond these states, int32 [num_columns]; 0: no state there."""
        few = slots[self._hits[slots] < PROVED]
        self._hits[few[few > 0]] = SUPERSEDED

    def check(self, nodes: Sequence[RadixNode]) -> None:
        """Raises AssertionError unless the states of `nodes` are the cached ones."""
        self._pool.check()
        cached: list[int] = []
        for node in nodes:
            assert len(node.states) == node.num_columns, "an edge's states do not belong to its pages"
            for slot in node.states[node.states > 0].tolist():
                assert self._nodes[slot] is node, "a state and its node disagree"
                cached.append(slot)
        assert len(set(cached)) == len(cached), "a slot is in the tree twice"
        assert sorted(cached) == np.flatnonzero(self.is_cached).tolist(), "cached states are misknown"
        assert not self.is_cached[self._pool.free_pages()].any(), "a cached slot is free"
        assert int((self.is_cached & (self._users == 0)).sum()) == self.num_evictable, "idle states are miscounted"
        assert self.num_free + self.num_evictable >= self.num_contended, "a row's fold would have to wait"

    def check_users(self, owned: Sequence[int], read: Sequence[int], ordered: Sequence[int]) -> None:
        """Raises AssertionError unless free + cached + owned == all. `owned`: rows' own slots; `read`: pinned for a
        match, once for each; `ordered`: taken for states that are computed now."""
        expected = np.bincount([*owned, *read, *ordered], minlength=self.num_slots + 1)
        assert np.array_equal(expected, self._users), "users of slots are miscounted"
        assert sorted(owned) == np.flatnonzero(self._is_owned).tolist(), "a slot and its row disagree"
        assert all(self.is_cached[slot] for slot in read), "a state that is read has left the tree"
        free, cached = self._pool.free_pages(), np.flatnonzero(self.is_cached)
        private = [slot for slot in (*owned, *ordered) if not self.is_cached[slot]]
        everywhere = [*free.tolist(), *cached.tolist(), *private]
        assert sorted(everywhere) == list(range(1, self.num_slots + 1)), "free + cached + owned differs from all slots"
