"""Cached pages of groups with windows: how many rows use each page, and the order of eviction.

A row uses a page while its next token sees it, so these pages are pinned one by one instead of by path. All arrays are
indexed by page id.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl_backend.arrays import Int32Array


class WindowPages:
    """Least recently used first: the page that was released first is evicted first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = 0  # cached pages, pinned or not
        self.num_pinned = 0
        self._is_cached = np.zeros(num_pages + 1, dtype=np.bool_)
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)
        self._idle_since = np.zeros(
            num_pages + 1, dtype=np.int64
        )  # tick of the last `let_go`; 0: pinned, or not cached
        self._queue: deque[tuple[int, Int32Array]] = deque()  # (tick, pages released then), lazily cleaned
        self._queued = 0  # total length of the queue's arrays

    def add(self, pages: Int32Array) -> None:
        """Adds pages to the cache, which are pinned at once."""
        self.num_pages += len(pages)
        self._is_cached[pages] = True

    def pin(self, pages: Int32Array) -> None:
        """Adds a user to each of these pages, no page twice."""
        self.num_pinned += int((self._pins[pages] == 0).sum())
        self._pins[pages] += 1
        self._idle_since[pages] = 0

    def let_go(self, pages: Int32Array, tick: int) -> None:
        """Removes a user from each page; a page is listed once for each user that releases it."""
        np.subtract.at(self._pins, pages, 1)
        idle = pages[self._pins[pages] == 0]
        if len(idle) > 1:
            idle = idle[np.sort(np.unique(idle, return_index=True)[1])]  # keeps the given order
        if not len(idle):
            return
        self.num_pinned -= len(idle)
        self._idle_since[idle] = tick
        self._queue.append((tick, idle))
        self._queued += len(idle)
        if self._queued > 2 * self.num_pages + 64:
            self._compact()

    def oldest(self) -> int | None:
        """The tick at which the next page to evict was released; None: all pages are in use."""
        while self._queue:
            tick, pages = self._queue[0]
            if (self._idle_since[pages] == tick).any():
                return tick
            self._queue.popleft()
            self._queued -= len(pages)
        return None

    def take_oldest(self, count: int) -> Int32Array:
        """Evicts up to `count` of the pages with the `oldest` tick; there must be some."""
        tick, pages = self._queue.popleft()
        self._queued -= len(pages)
        pages = pages[self._idle_since[pages] == tick]
        if len(pages) > count:
            self._queue.appendleft((tick, pages[count:]))
            self._queued += len(pages) - count
            pages = pages[:count]
        self.forget(pages)
        return pages

    def forget(self, pages: Int32Array) -> None:
        """Removes pages without a user from the cache."""
        self.num_pages -= len(pages)
        self._is_cached[pages] = False
        self._idle_since[pages] = 0

    def check(self, cached: Int32Array, in_use: Int32Array) -> None:
        """Raises AssertionError unless `cached` are the cached pages and `in_use` the pages in use, once for each
        user."""
        expected = np.bincount(in_use, minlength=len(self._pins))
        assert np.array_equal(expected, self._pins), "users of cached pages are miscounted"
        assert np.array_equal(np.sort(cached), np.flatnonzero(self._is_cached)), "cached pages are misknown"
        assert len(cached) == self.num_pages, "cached pages are miscounted"
        assert int((self._pins > 0).sum()) == self.num_pinned, "pages in use are miscounted"
        idle = self._is_cached & (self._pins == 0)
        assert np.array_equal(idle, self._idle_since > 0), "an idle page is not in the eviction order, or a used one is"
        queued = {(tick, page) for tick, pages in self._queue for page in pages.tolist()}
        assert all((self._idle_since[page], page) in queued for page in np.flatnonzero(idle)), "an idle page is lost"

    def _compact(self) -> None:
        kept = ((tick, pages[self._idle_since[pages] == tick]) for tick, pages in self._queue)
        self._queue = deque((tick, pages) for tick, pages in kept if len(pages))
        self._queued = sum(len(pages) for _, pages in self._queue)
