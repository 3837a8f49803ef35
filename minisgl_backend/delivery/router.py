"""Which engine core gets a request: where its prefix is cached, unless that core has more to do than others.

A router knows only what it sent where and what has ended since, so what it thinks is cached is a guess: the prompts
sent to a core, as many as its cache can hold, the least recently used forgotten first. A wrong guess costs computation,
never an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from minisgl_backend.request import Content

TOKEN_BYTES = 4  # prompts come as little-endian int32
BLOCK_TOKENS = 64  # prompts are compared in blocks of so many tokens, or of one page where pages are larger
SEQUENCE_TOKENS = 128  # a cached prefix of so many tokens makes up for one more sequence in the batch
# No prefix makes up for more than so many sequences above the least loaded core's, and that share of those.
MARGIN_SEQUENCES = 16
MARGIN_SHARE = 0.25


class _Core:
    """One engine core as the router sees it."""

    __slots__ = ("block_bytes", "blocks", "capacity", "chosen_at", "is_up", "load")

    def __init__(self) -> None:
        self.is_up = False
        self.load = 0  # sequences that were sent there and have not ended
        self.chosen_at = 0  # place of its last request in the order of all
        self.block_bytes = BLOCK_TOKENS * TOKEN_BYTES
        self.capacity = 0  # blocks that fit into its cache
        self.blocks: OrderedDict[int, None] = OrderedDict()  # hashes; the least recently used first

    def come_up(self, page_size: int, num_pages: int) -> None:
        block = max(page_size, BLOCK_TOKENS)
        self.is_up, self.block_bytes, self.capacity = True, block * TOKEN_BYTES, num_pages * page_size // block
        self.blocks.clear()

    def matched_tokens(self, hashes: Iterable[int]) -> int:
        count = 0
        for value in hashes:
            if value not in self.blocks:
                break
            count += 1
        return count * self.block_bytes // TOKEN_BYTES

    def remember(self, hashes: list[int]) -> None:
        for value in reversed(hashes):  # as in the cache, an end is forgotten before its beginning
            self.blocks[value] = None
            self.blocks.move_to_end(value)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class Router:
    """The owner of where each sequence is computed; thread-safe. Cores are numbered from 0 and down at first."""

    def __init__(self, num_cores: int) -> None:
        self._lock = threading.Lock()
        self._cores = [_Core() for _ in range(num_cores)]
        self._core_of: dict[int, int] = {}  # by uid of every sequence that has not ended
        self._num_placed = 0

    def note_up(self, core: int, page_size: int, num_pages: int) -> None:
        """A core is ready: it may get requests, and nothing is cached there. `num_pages` of `page_size` tokens."""
        with self._lock:
            self._cores[core].come_up(page_size, num_pages)

    def note_down(self, core: int) -> list[int]:
        """A core is gone, with all that was there; returns the uids of its sequences."""
        with self._lock:
            self._cores[core].is_up = False
            lost = [uid for uid, place in self._core_of.items() if place == core]
            self._release(lost)
            return lost

    def place(
        self,
        uid: int,
        num_sequences: int,
        token_ids: bytes,
        without: Collection[int] = (),
        cache_salt: str = "",
        contents: Sequence[Content] = (),
    ) -> int | None:
        """The core for a request of sequences `uid` to `uid + num_sequences - 1`, which counts as sent there until
        they are released; None while no core is up but those of `without`. `token_ids`: little-endian int32, as in
        `Request`, as are `contents`; `cache_salt`: prompts with other ones are others."""
        with self._lock:
            living = [index for index, core in enumerate(self._cores) if core.is_up and index not in without]
            if not living:
                return None
            index = living[0] if len(self._cores) == 1 else self._choose(living, token_ids, cache_salt, contents)
            self._cores[index].load += num_sequences
            self._core_of.update(dict.fromkeys(range(uid, uid + num_sequences), index))
            return index

    def release(self, uids: Iterable[int]) -> None:
        """These sequences have ended; unknown ones are ignored."""
        with self._lock:
            self._release(uids)

    def by_core(self, uids: Iterable[int]) -> dict[int, list[int]]:
        """Those of these sequences that have not ended, by core."""
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

    def _choose(self, living: list[int], token_ids: bytes, cache_salt: str, contents: Sequence[Content]) -> int:
        least = min(self._cores[index].load for index in living)
        most = least + MARGIN_SEQUENCES + int(MARGIN_SHARE * least)
        hashes = list(_block_hashes(token_ids, self._cores[living[0]].block_bytes, cache_salt, contents))

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
    token_ids: bytes, block_bytes: int, cache_salt: str = "", contents: Sequence[Content] = ()
) -> Iterator[int]:
    """One for each whole block, of it and all before it."""
    value = hash(cache_salt)
    for start in range(0, len(token_ids) - block_bytes + 1, block_bytes):
        first, end = start // TOKEN_BYTES, (start + block_bytes) // TOKEN_BYTES
        inside = [(one.start - first, one.digest) for one in contents if first - one.length < one.start < end]
        value = hash((value, token_ids[start : start + block_bytes], *inside))
        yield value
