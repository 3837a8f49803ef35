"""Prompt lookup: what followed the last tokens when they were there before, in the prompt or in the answer.

(Saxena 2023, "Prompt Lookup Decoding".) Each row has an index of its latest tokens, made as LZ77 compressors make
theirs: by the hash of the last few tokens a chain of the positions behind which they stand, the latest first.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array, Int64Array
from minisgl_backend.speculation.proposer import Proposer
from minisgl_backend.speculative_config import SpeculativeConfig

WINDOW = 1 << 15  # tokens that an index knows, the latest ones; a power of two
SMALLEST = 1 << 10
LONGEST_CHAIN = 8  # positions that are compared at each lookup
NOWHERE = -1
_FACTOR, _MASK = 0x9E3779B1, 0xFFFFFFFF


class NgramProposer(Proposer):
    """Proposes what followed the longest of the latest matches, and no more tokens than matched, but where as many did
    as are compared. Costs the same for each token."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        """A match is at least `lookup_min` tokens long, and more than `lookup_max` tokens of it count for nothing."""
        self._min, self._max = lookup_min, lookup_max
        self._rows: dict[int, _Index] = {}

    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        index = self._rows.get(row)
        if index is None or index.uid != uid or index.end > len(token_ids):
            index = self._rows[row] = _Index(uid, self._min, len(token_ids))
        index.add(token_ids)
        start, matched = index.find(token_ids, self._max)
        if start == NOWHERE:
            return NO_INT32
        if matched < self._max:  # what two tokens say holds for two
            most = min(most, matched)
        # Where the match overlaps what is to come, it goes round: "abab" is followed by "abab".
        period = len(token_ids) - start
        found = token_ids[start : start + most]
        return found.copy() if period >= most else np.resize(found, most)


def create_ngram_proposer(config: SpeculativeConfig) -> NgramProposer:
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)


class _Index:
    """Positions behind n tokens, by their hash. `_head` has the latest of each hash, `_before` of each position the one
    before it of the same hash."""

    __slots__ = ("_before", "_head", "_n", "end", "uid")

    def __init__(self, uid: int, n: int, num_tokens: int) -> None:
        self.uid = uid
        self.end = 0  # positions up to here are known, this one included
        self._n = n
        self._make_room(num_tokens)

    def add(self, token_ids: Int32Array) -> None:
        """The tokens that are new since the last call."""
        total = len(token_ids)
        if total > len(self._before) < WINDOW:
            self.end = 0
            self._make_room(2 * total)
        first = max(self.end + 1, self._n, total - WINDOW + 1)
        if total - first < 16:
            for end in range(first, total + 1):
                slot = _hash(token_ids[end - self._n : end].tolist()) & (len(self._head) - 1)
                self._before[end & (len(self._before) - 1)] = self._head[slot]
                self._head[slot] = end
        elif total >= first:
            self._add_many(token_ids, first)
        self.end = total

    def find(self, token_ids: Int32Array, longest: int) -> tuple[int, int]:
        """The position behind the longest match of the last tokens, of equal ones the latest, and the tokens of the
        match, at most `longest`; NOWHERE without any."""
        total = len(token_ids)
        if total <= self._n:
            return NOWHERE, 0
        last: list[int] = token_ids[max(0, total - longest) :].tolist()
        found, length = NOWHERE, self._n - 1
        candidate = int(self._before[total & (len(self._before) - 1)])
        for _ in range(LONGEST_CHAIN):
            if candidate <= 0 or total - candidate >= len(self._before):
                break
            matched = _common_end(token_ids[max(0, candidate - longest) : candidate].tolist(), last)
            if matched > length:
                found, length = candidate, matched
                if matched == longest:
                    break
            candidate = int(self._before[candidate & (len(self._before) - 1)])
        return found, length

    def _make_room(self, num_tokens: int) -> None:
        size = SMALLEST
        while size < min(num_tokens, WINDOW):
            size *= 2
        self._head: Int32Array = np.full(2 * size, NOWHERE, dtype=np.int32)
        self._before: Int32Array = np.full(size, NOWHERE, dtype=np.int32)  # a ring

    def _add_many(self, token_ids: Int32Array, first: int) -> None:
        """All positions from `first` on at once."""
        ends = np.arange(first, len(token_ids) + 1)
        slots = _hashes(token_ids[first - self._n :], self._n) & (len(self._head) - 1)
        order = np.argsort(slots, kind="stable")
        slots, ends = slots[order], ends[order]
        is_first = np.ones(len(slots), dtype=np.bool_)
        is_first[1:] = slots[1:] != slots[:-1]
        before = np.empty(len(ends), dtype=np.int32)
        before[1:] = ends[:-1]
        before[is_first] = self._head[slots[is_first]]
        self._before[ends & (len(self._before) - 1)] = before
        is_last = np.append(is_first[1:], True)
        self._head[slots[is_last]] = ends[is_last]


def _hash(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = (value * _FACTOR + token + 1) & _MASK
    return value ^ (value >> 15)


def _hashes(token_ids: Int32Array, n: int) -> Int64Array:
    """`_hash` of every n tokens that follow one another; int64 [num_tokens - n + 1]."""
    count = len(token_ids) - n + 1
    value = np.zeros(count, dtype=np.uint64)
    for offset in range(n):
        value = (value * np.uint64(_FACTOR) + token_ids[offset : offset + count].astype(np.uint64) + np.uint64(1)) & (
            np.uint64(_MASK)
        )
    return (value ^ (value >> np.uint64(15))).astype(np.int64)


def _common_end(one: list[int], other: list[int]) -> int:
    """Tokens at the end of both that are equal."""
    most, count = min(len(one), len(other)), 0
    while count < most and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
