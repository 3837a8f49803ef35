"""Which images' vectors are held, and which are being encoded: the books of the memory that the runner keeps for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    """One image."""

    num_bytes: int  # counted now
    vector_bytes: int  # when it is held
    units: int  # of work
    done: int = 0  # of these, by all steps planned so far
    owners: set[int] = field(default_factory=set)  # that pin it
    touched: int = -1  # the last step that encodes or needs it
    rank: int = 0  # that encodes it

    @property
    def is_held(self) -> bool:
        return self.done == self.units


class EncoderBooks:
    """Keys are those of `step.vectors_key`. An entry is being encoded, or held once all units are planned; what no
    owner pins is dropped when room is needed, the least recently used first. The runner follows the plans: what is
    counted here is what it has."""

    def __init__(self, capacity: int, num_ranks: int = 1) -> None:
        """capacity: bytes. Images are dealt to the ranks in turns."""
        self.capacity = capacity
        self._num_ranks = num_ranks
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._freed: list[bytes] = []  # for the next plan
        self.used = 0  # bytes
        self.hits = self.misses = self.evictions = 0

    def is_held(self, key: bytes) -> bool:
        """Whether all its units are planned."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_held

    def done_of(self, key: bytes) -> int:
        """How many of its units are planned; 0 where it has not begun."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.done

    def rank_of(self, key: bytes) -> int:
        """The tensor-parallel rank that encodes one that has begun."""
        return self._entries[key].rank

    def begin(
        self, key: bytes, units: int, state_bytes: int, vector_bytes: int, step: int, first: int | None = None
    ) -> bool:
        """Makes room for an image of so many units of work, unless it has begun; False: there is none while others are
        pinned. `first`: an owner who goes on even so: others encode theirs again, and its own may take more together
        while this one is encoded."""
        if key in self._entries:
            return True
        needed = max(state_bytes, vector_bytes)
        kept = [entry for entry in self._entries.values() if self._stays(entry, step, first)]
        dropped = [one for one, entry in self._entries.items() if not self._stays(entry, step, first)]
        dropped.sort(key=lambda one: bool(self._entries[one].owners))
        free = self.capacity - self.used
        fits = needed <= free + sum(self._entries[one].num_bytes for one in dropped)
        # Alone an image may take more while it is encoded, if its vectors fit.
        is_alone = all(first in entry.owners for entry in kept)
        if not fits and not (is_alone and vector_bytes + sum(one.vector_bytes for one in kept) <= self.capacity):
            return False
        for one in dropped:
            if needed <= self.capacity - self.used:
                break
            self.evictions += 1
            self.drop(one)
        self._entries[key] = _Entry(needed, vector_bytes, units, rank=self.misses % self._num_ranks)
        self.used += needed
        self.misses += 1
        return True

    def _stays(self, entry: _Entry, step: int, first: int | None) -> bool:
        return entry.touched >= step or (bool(entry.owners) if first is None else first in entry.owners)

    def advance(self, key: bytes, done: int, step: int) -> None:
        """This step computes its units up to `done`."""
        entry = self._entries[key]
        entry.done, entry.touched = done, step
        if entry.is_held:
            self.used += entry.vector_bytes - entry.num_bytes
            entry.num_bytes = entry.vector_bytes

    def pin(self, key: bytes, owner: int, step: int = -1) -> None:
        """It stays until this owner, a sequence's uid, unpins it; and in `step`, which needs it, whoever is first."""
        entry = self._entries[key]
        entry.touched = max(entry.touched, step)
        if owner not in entry.owners:
            self.hits += entry.is_held
            entry.owners.add(owner)
        self._entries.move_to_end(key)

    def unpin(self, key: bytes, owner: int) -> None:
        """Nothing where it does not pin it, or it was dropped."""
        if (entry := self._entries.get(key)) is not None:
            entry.owners.discard(owner)

    def drop(self, key: bytes) -> None:
        """It is gone, or worthless, whoever pins it; the next plan tells the runner."""
        if (entry := self._entries.pop(key, None)) is not None:
            self.used -= entry.num_bytes
            self._freed.append(key)

    def take_freed(self) -> tuple[bytes, ...]:
        """Keys dropped since the last call, for the plan that is being made."""
        freed, self._freed = tuple(dict.fromkeys(self._freed)), []
        return freed

    def free_again(self, keys: Iterable[bytes]) -> None:
        """A plan with these freed keys was not executed."""
        self._freed += [key for key in keys if key not in self._entries]

    def check(self, owners: set[int]) -> None:
        """Raises AssertionError unless what is counted is what is there, and only these owners pin it."""
        assert self.used == sum(entry.num_bytes for entry in self._entries.values()), "bytes are counted otherwise"
        for entry in self._entries.values():
            assert entry.owners <= owners, "one that is gone pins vectors"
            expected = entry.vector_bytes if entry.is_held else entry.num_bytes
            assert entry.num_bytes == expected, "a held image counts as one that is being encoded"
