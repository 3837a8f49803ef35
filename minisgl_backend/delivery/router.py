"""Which engine core gets a request: the one that caches its prefix, unless that core has more work than others.

A router knows only what it sent where and what has ended since, so it guesses what is cached: the prompts sent to a
core, up to the size of its cache, in least-recently-used order. A wrong guess costs computation, never a wrong answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minisgl_backend.request import Content

TOKEN_BYTES = 4  # prompts come as little-endian int32
BLOCK_TOKENS = 64  # prompts are compared in blocks of that many tokens, or of one page if pages are larger
SEQUENCE_TOKENS = 128  # a cached prefix of that many tokens makes up for one more sequence in the batch
# A prefix makes up for at most that many sequences above the least loaded core's, plus that share of them.
MARGIN_SEQUENCES = 16
MARGIN_SHARE = 0.25


@dataclass(slots=True)
class _Core:
    """One engine core as the router sees it."""

    is_up: bool = False
    load: int = 0  # sequences that were sent there and have not ended
    chosen_at: int = 0  # serial number of its last request among all requests
    block_bytes: int = BLOCK_TOKENS * TOKEN_BYTES
    capacity: int = 0  # blocks that fit into its cache
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # hashes; the least recently used first

    def come_up(self, page_size: int, num_pages: int) -> None:
        block = max(page_size, BLOCK_TOKENS)
        self.is_up, self.block_bytes, self.capacity = True, block * TOKEN_BYTES, num_pages * page_size // block
        self.blocks.clear()

    def matched_tokens(self, hashes: Iterable[int]) -> int:
        count = sum(1 for _ in takewhile(self.blocks.__contains__, hashes))
        return count * self.block_bytes // TOKEN_BYTES

    def remember(self, hashes: list[int]) -> None:
        for value in reversed(hashes):  # as in the cache, the end of a prompt is forgotten before its beginning
            self.blocks[value] = None
            self.blocks.move_to_end(value)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class Router:
    """Owns the assignment of sequences to cores; thread-safe. Cores are numbered from 0 and down at first."""

    def __init__(self, num_cores: int) -> None:
        self._lock = threading.Lock()
        self._cores = [_Core() for _ in range(num_cores)]
        self._core_of: dict[int, int] = {}  # by uid; all sequences that have not ended
        self._num_placed = 0

    def note_up(self, core: int, page_size: int, num_pages: int) -> None:
        """A core is ready for requests, with an empty cache of `num_pages` pages of `page_size` tokens."""
        with self._lock:
            self._cores[core].come_up(page_size, num_pages)

    def note_down(self, core: int) -> list[int]:
        """A core is gone with all its sequences, whose uids are returned."""
        with self._lock:
            self._cores[core].is_up = False
            lost = [uid for uid, owner in self._core_of.items() if owner == core]
            self._release(lost)
            return lost

    def assign(
        self,
        uid: int,
        num_sequences: int,
        token_ids: bytes,
        without: Collection[int] = (),
        salt: Hashable = "",
        contents: Sequence[Content] = (),
    ) -> int | None:
        """Assigns a request of sequences `uid` to `uid + num_sequences - 1` to a core, which counts them as its load
        until they are released; None while no core outside `without` is up. `token_ids`: little-endian int32, as in
        `Request`, like `contents`; `salt`: prompts with different ones share no prefix."""
        with self._lock:
            living = [index for index, core in enumerate(self._cores) if core.is_up and index not in without]
            if not living:
                return None
            index = living[0] if len(self._cores) == 1 else self._choose(living, token_ids, salt, contents)
            self._cores[index].load += num_sequences
            self._core_of.update(dict.fromkeys(range(uid, uid + num_sequences), index))
            return index

    def release(self, uids: Iterable[int]) -> None:
        """These sequences have ended; unknown ones are ignored."""
        with self._lock:
            self._release(uids)

    def by_core(self, uids: Iterable[int]) -> dict[int, list[int]]:
        """Groups those of these sequences that have not ended by core."""
        found: dict[int, list[int]] = {}
        with self._lock:
            for uid in uids:
                if (core := self._core_of.get(uid)) is not None:
                    found.setdefault(core, []).append(uid)
        return found

    def _release(self, uids: Iterable[int]) -> None:
        for uid in uids:
            if (core := self._core_of.pop(uid, None)) is not None:
                self._cores[core].load -= 1

    def _choose(self, living: list[int], token_ids: bytes, salt: Hashable, contents: Sequence[Content]) -> int:
        least = min(self._cores[index].load for index in living)
        most = least + MARGIN_SEQUENCES + int(MARGIN_SHARE * least)
        hashes = list(_block_hashes(token_ids, self._cores[living[0]].block_bytes, salt, contents))

        def worth(index: int) -> tuple[int, int, int]:
            core = self._cores[index]
            matched = core.matched_tokens(hashes) if core.load <= most else 0
            return matched - SEQUENCE_TOKENS * (core.load - least), -core.load, -core.chosen_at

        chosen = max(living, key=worth)
        self._num_placed += 1
        self._cores[chosen].chosen_at = self._num_placed
        self._cores[chosen].remember(hashes)
        return chosen


def _block_hashes(
    token_ids: bytes, block_bytes: int, salt: Hashable = "", contents: Sequence[Content] = ()
) -> Iterator[int]:
    """A hash for each whole block, which covers it and all blocks before it."""
    value = hash(salt)
    for start in range(0, len(token_ids) - block_bytes + 1, block_bytes):
        first, end = start // TOKEN_BYTES, (start + block_bytes) // TOKEN_BYTES
        inside = [
            ("content", one.start - first, one.digest) for one in contents if first - one.length < one.start < end
        ]
        value = hash((value, token_ids[start : start + block_bytes], *inside))
        yield value
