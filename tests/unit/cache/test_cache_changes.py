"""A reader of a radix cache's changes knows at any time what is in it, by hashes that only tokens decide."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minisgl_backend.cache.changes import CacheChange, PagesRemoved, PagesStored, page_hashes
from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.cache.lease import PageLease
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL, CacheKind, Chunked, Sliding

NUM_PAGES = 24


class Reader:
    """Knows the prefixes that are cached, each up to the end of a page."""

    def __init__(self) -> None:
        self.prefixes: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # by hash: the salt and the tokens

    def read(self, changes: list[CacheChange], page_size: int) -> None:
        for change in changes:
            if isinstance(change, PagesRemoved):
                for value in change.hashes:
                    del self.prefixes[value]
                continue
            assert len(change.token_ids) == len(change.hashes) * page_size
            salt, tokens = (change.salt, ()) if change.parent is None else self.prefixes[change.parent]
            for page, value in enumerate(change.hashes):
                tokens += tuple(change.token_ids[page * page_size : (page + 1) * page_size].tolist())
                assert value not in self.prefixes
                self.prefixes[value] = salt, tokens


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_reader_of_the_changes_knows_the_cache(page_size: int) -> None:
    draw, reader = random.Random(page_size), Reader()
    manager = KVManager(NUM_PAGES, CacheGroups((FULL,), page_size), 4, NUM_PAGES, "radix", record_changes=True)
    running: list[tuple[PageLease, np.ndarray]] = []
    removed = 0
    for _ in range(2000):
        if running and (len(running) == 4 or draw.random() < 0.5):
            lease, tokens = running.pop(draw.randrange(len(running)))
            manager.release(lease, tokens)
        else:
            tokens = np.array([draw.randint(0, 1) for _ in range(draw.randint(1, 6 * page_size))], dtype=np.int32)
            salt = draw.choice([b"", b"a", b"b"])
            match = manager.match(tokens, salt)
            if manager.pages_for(len(tokens)) - match.num_pages > manager.num_available:
                manager.unmatch(match)
                continue
            free = min(set(range(4)) - {lease.row for lease, _ in running})
            running.append((manager.acquire(free, match, len(tokens)), tokens))
        changes = manager.take_cache_changes()
        removed += sum(len(change.hashes) for change in changes if isinstance(change, PagesRemoved))
        reader.read(changes, page_size)
        assert len(reader.prefixes) == manager._cache.num_pages
        for salt_bytes, prefix in reader.prefixes.values():
            assert manager.cached_tokens(np.array(prefix, dtype=np.int32), salt_bytes) == len(prefix)
        manager.check([lease for lease, _ in running])
    assert removed > 50
    assert manager.take_cache_changes() == []


@pytest.mark.parametrize("kinds", [(FULL, Sliding(3)), (Sliding(4),), (FULL, FULL, Chunked(6))])
def test_a_reader_knows_all_prefixes_that_can_be_used_where_there_are_windows(kinds: tuple[CacheKind, ...]) -> None:
    """A block is told as stored while its prefix is in the tree: never less than can be used, and more where a window's
    pages are gone."""
    page_size = 2
    draw, reader, groups = random.Random(0), Reader(), CacheGroups(kinds, page_size)
    manager = KVManager(NUM_PAGES * len(kinds), groups, 4, NUM_PAGES, "radix", record_changes=True)
    running: list[tuple[PageLease, np.ndarray]] = []
    removed = used = gone = 0
    for _ in range(600):
        if running and (len(running) == 4 or draw.random() < 0.5):
            lease, tokens = running.pop(draw.randrange(len(running)))
            if (swap := manager.publish(lease, tokens)) is not None:
                manager.free(swap.old)
            manager.free_out_of_window(np.array([lease.row]), np.array([len(tokens)], dtype=np.int32))
            manager.release(lease, tokens)
        else:
            tokens = np.array([draw.randint(0, 1) for _ in range(draw.randint(1, 20))], dtype=np.int32)
            match = manager.match(tokens)
            used += match.num_pages
            if manager.pages_to_take(match, len(tokens), len(tokens)) > manager.num_available:
                manager.unmatch(match)
                continue
            free = min(set(range(4)) - {lease.row for lease, _ in running})
            running.append((manager.acquire(free, match, len(tokens)), tokens))
        changes = manager.take_cache_changes()
        removed += sum(len(change.hashes) for change in changes if isinstance(change, PagesRemoved))
        reader.read(changes, page_size)
        told = {prefix for _, prefix in reader.prefixes.values()}
        for prefix in told:
            usable = manager.cached_tokens(np.array(prefix, dtype=np.int32))
            assert usable == 0 or prefix[:usable] in told
            gone += usable < len(prefix)
        asked = np.array([draw.randint(0, 1) for _ in range(20)], dtype=np.int32)
        usable = manager.cached_tokens(asked)
        assert usable == 0 or tuple(asked[:usable].tolist()) in told
        manager.check([lease for lease, _ in running])
    assert min(removed, used, gone) > 50


def test_hashes_are_those_of_the_tokens_and_all_before_them() -> None:
    tokens = np.arange(12, dtype=np.int32)
    hashes = page_hashes(None, tokens, 4)
    assert page_hashes(hashes[0], tokens[4:], 4) == hashes[1:]
    assert page_hashes(None, tokens[4:], 4)[0] != hashes[1]
    assert not set(hashes) & set(page_hashes(None, tokens, 4, b"salt"))
    assert len({*hashes, *page_hashes(None, tokens[::-1], 4)}) == 6
    assert all(0 <= value < 1 << 64 for value in hashes)


def test_nothing_is_recorded_unless_somebody_asks() -> None:
    cache = RadixCache(page_size=2)
    cache.extend(cache.match(np.arange(4, dtype=np.int32)).pin, np.arange(4, dtype=np.int32), np.array([[1, 2]]))
    assert cache.take_changes() == []
    stored = RadixCache(page_size=2, record_changes=True)
    stored.extend(stored.match(np.arange(4, dtype=np.int32)).pin, np.arange(4, dtype=np.int32), np.array([[1, 2]]))
    (change,) = stored.take_changes()
    assert isinstance(change, PagesStored)
    assert change.parent is None
