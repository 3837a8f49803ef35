"""Page pool, prefix caches and leases, one behaviour at a time."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.cache.kv_manager import KVManager
from minisgl_backend.cache.lease import PageLease
from minisgl_backend.cache.page_pool import PagePool
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL, CacheKind, Sliding


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def start(manager: KVManager, row: int, tokens: np.ndarray) -> PageLease:
    return manager.acquire(row, manager.match(tokens), len(tokens))


def test_pages_are_numbered_from_one_and_come_back() -> None:
    pool = PagePool(4)
    assert sorted(pool.take(3).tolist()) == [1, 2, 3]
    assert pool.num_free == 1
    pool.give_back(ids(2))
    assert pool.take(1).tolist() == [2]
    pool.check()


def test_a_page_that_is_free_cannot_be_given_back() -> None:
    pool = PagePool(4)
    for pages in (ids(1), ids(0)):
        with pytest.raises(RuntimeError, match="cannot be given back"):
            pool.give_back(pages)
    pool.check()


def test_match_finds_whole_pages_only() -> None:
    cache = RadixCache(page_size=4)
    tokens = np.arange(12, dtype=np.int32)
    pin = cache.extend(cache.match(tokens[:0]).pin, tokens, ids(1, 2, 3)[None]).pin
    cache.unpin(pin)
    assert cache.match(tokens[:11]).pages.tolist() == [[1, 2]]
    assert cache.peek(np.append(tokens[:7], 99).astype(np.int32)) == 1
    assert cache.peek(tokens[1:]) == 0
    assert cache.match(np.append(tokens, tokens)).pages.tolist() == [[1, 2, 3]]


def test_an_edge_splits_where_two_prompts_part() -> None:
    cache = RadixCache(page_size=2)
    first, second = ids(1, 2, 3, 4, 5, 6), ids(1, 2, 3, 4, 9, 9)
    cache.unpin(cache.extend(cache.match(first[:0]).pin, first, ids(1, 2, 3)[None]).pin)
    match = cache.match(second)
    assert match.pages.tolist() == [[1, 2]]
    pin = cache.extend(match.pin, second[4:], ids(7)[None]).pin
    cache.check([pin])
    assert cache.match(first).pages.tolist() == [[1, 2, 3]]
    assert (cache.num_pages, cache.num_evictable) == (4, 0)


def test_a_pin_outlives_a_split_above_it() -> None:
    cache = RadixCache(page_size=1)
    tokens = ids(1, 2, 3, 4)
    pin = cache.extend(cache.match(tokens[:0]).pin, tokens, tokens[None]).pin
    other = cache.match(ids(1, 2, 9)).pin
    cache.check([pin, other])
    assert cache.num_evictable == 0
    cache.unpin(pin)
    assert cache.num_evictable == 2
    cache.unpin(other)
    assert cache.num_evictable == 4
    cache.check([])


def test_least_recently_used_leaves_go_first_and_from_their_end() -> None:
    cache = RadixCache(page_size=1)
    for tokens in (ids(1, 2, 3), ids(1, 5, 6), ids(8, 9)):
        match = cache.match(tokens)
        new = tokens[match.num_pages :]
        cache.unpin(cache.extend(match.pin, new, new[None]).pin)
    cache.unpin(cache.match(ids(1, 2, 3)).pin)  # used again: now the youngest
    assert cache.evict(1).tolist() == [6]
    assert cache.evict(2).tolist() == [5, 9]
    assert cache.evict(99).tolist() == [8, 2, 3, 1]
    assert cache.num_pages == 0
    cache.check([])


def test_pinned_pages_are_never_evicted() -> None:
    cache = RadixCache(page_size=1)
    pin = cache.extend(cache.match(ids()).pin, ids(1, 2), ids(1, 2)[None]).pin
    tail = cache.extend(cache.match(ids(1, 2)).pin, ids(3), ids(3)[None]).pin
    cache.unpin(tail)
    assert cache.evict(3).tolist() == [3]
    cache.check([pin])


def test_many_uses_do_not_grow_the_heap() -> None:
    cache = RadixCache(page_size=1)
    cache.unpin(cache.extend(cache.match(ids()).pin, ids(1, 2), ids(1, 2)[None]).pin)
    for _ in range(1000):
        cache.unpin(cache.match(ids(1, 2)).pin)
    assert len(cache._leaves) < 100


@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_a_lease_ends_once(cache_type: str) -> None:
    manager = KVManager(8, CacheGroups((FULL,), 4), max_rows=2, max_pages_per_row=8, cache_type=cache_type)
    tokens = np.arange(10, dtype=np.int32)
    lease = start(manager, 0, tokens)
    assert manager.pages_of(lease).tolist() == [[1, 2, 3]]
    manager.extend(np.array([0]))
    manager.check([lease])
    manager.release(lease, tokens)
    manager.check([])
    with pytest.raises(RuntimeError, match="has ended already"):
        manager.release(lease)
    with pytest.raises(RuntimeError, match="has ended already"):
        manager.publish(lease, tokens)
    assert manager.num_available == 8
    assert manager._cache.num_pages == (2 if cache_type == "radix" else 0)


def test_equal_pages_are_swapped_for_those_of_the_cache() -> None:
    manager = KVManager(20, CacheGroups((FULL,), 4), max_rows=3, max_pages_per_row=8, cache_type="radix")
    tokens = np.arange(14, dtype=np.int32)
    first, second = start(manager, 0, tokens), start(manager, 1, tokens)
    assert manager.publish(first, tokens) is None
    (own,) = manager.pages_of(second).tolist()
    swap = manager.publish(second, tokens)
    assert swap is not None
    assert swap.entries.columns.tolist() == [0, 1, 2]
    assert swap.old.tolist() == own[:3]
    assert manager.pages_of(second).tolist() == [[*manager.pages_of(first)[0, :3].tolist(), own[3]]]
    manager.check([first, second], swap.old)
    manager.free(swap.old)
    manager.release(first)
    manager.release(second)
    manager.check([])
    assert (manager.num_free, manager.num_evictable) == (17, 3)


def test_taking_pages_evicts_what_only_the_cache_keeps() -> None:
    manager = KVManager(4, CacheGroups((FULL,), 1), max_rows=2, max_pages_per_row=4, cache_type="radix")
    old = ids(1, 2, 3)
    manager.release(start(manager, 0, old), old)
    assert (manager.num_free, manager.num_available) == (1, 4)
    lease = start(manager, 0, ids(7, 8, 9))
    manager.check([lease])
    assert manager.match(old).pages.tolist() == [[1]]


@pytest.mark.parametrize("kinds", [(Sliding(16),), (FULL, Sliding(16))])
def test_a_prefix_shorter_than_the_window_is_reused(kinds: tuple[CacheKind, ...]) -> None:
    manager = KVManager(64, CacheGroups(kinds, 4), 2, 16, "radix")
    tokens = np.arange(13, dtype=np.int32)
    lease = start(manager, 0, tokens)
    manager.publish(lease, tokens[:12])
    manager.release(lease, tokens[:12])
    for length, pages in ((13, 3), (9, 2), (4, 1)):
        match = manager.match(tokens[:length])
        assert match.num_pages == pages
        manager.unmatch(match)
