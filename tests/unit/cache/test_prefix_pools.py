"""Where a prefix ends, if what tokens need of it is in several pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.radix_node import RadixNode
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL, Sliding


class Checkpoints:
    """Has something behind these columns only."""

    def __init__(self, *columns: int) -> None:
        self.columns = columns

    def prefix_end(self, path: Sequence[RadixNode], most: int) -> int:
        return max((column for column in self.columns if column <= most), default=0)


@pytest.mark.parametrize(
    ("pools", "holes", "expected"),
    [
        ([(4, 8)], [], 8),
        ([(4, 8), (4, 6)], [], 4),  # the second has something behind 6, and the first nothing
        ([(3, 5, 7), (7,)], [], 7),
        ([(5,), (3,)], [], 0),
        ([(2, 7, 8)], [6], 2),  # behind 8 a token sees the hole in the window, and so it does behind 7
        ([(2, 7, 8)], [4], 8),
        ([()], [], 0),
    ],
)
def test_the_shortest_answer_counts(pools: list[tuple[int, ...]], holes: list[int], expected: int) -> None:
    cache = RadixCache(1, groups=CacheGroups((FULL, Sliding(3)), 1), num_pages=16)
    cache._pools += [Checkpoints(*columns) for columns in pools]
    pages = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    pages[1, holes] = 0
    root = cache.match(np.zeros(0, dtype=np.int32))
    tokens = np.arange(9, dtype=np.int32)
    cache.extend(root.pin, tokens[:8], pages)
    assert cache.peek(tokens) == expected
    assert cache.match(tokens).num_pages == expected
