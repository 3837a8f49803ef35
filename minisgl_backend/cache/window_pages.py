"""Cached pages of groups with windows: how many rows use each, and in which order they are forgotten.

A row uses such a page while its next token sees it, so these pages are pinned one by one, not by the path that leads to
them. All arrays are indexed by page id.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from minisgl_backend.arrays import Int32Array


class WindowPages:
    """The least recently used first: the page that was let go first is the first to be forgotten."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = 0  # cached, pinned or not
        self.num_pinned = 0
        self._is_cached = np.zeros(num_pages + 1, dtype=np.bool_)
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)
        self._idle_since = np.zeros(
            num_pages + 1, dtype=np.int64
        )  # tick of the last `let_go`; 0: pinned, or not cached
        self._queue: deque[tuple[int, Int32Array]] = deque()  # (tick, pages let go then), lazily cleaned
        self._queued = 0  # entries of all its arrays

    def add(self, pages: Int32Array) -> None:
        """Pages that the cache holds from now on, and that are pinned at once."""
        self.num_pages += len(pages)
        self._is_cached[pages] = True

    def pin(self, pages: Int32Array) -> None:
        """One more user of each of these pages, no page twice."""
        self.num_pinned += int((self._pins[pages] == 0).sum())
        self._pins[pages] += 1
        self._idle_since[pages] = 0

    def let_go(self, pages: Int32Array, tick: int) -> None:
        """One user less of each; a page is listed once for each user that lets it go."""
        np.subtract.at(self._pins, pages, 1)
        idle = pages[self._pins[pages] == 0]
        if len(idle) > 1:
            idle = idle[np.sort(np.unique(idle, return_index=True)[1])]  # in the order given
        if not len(idle):
            return
        self.num_pinned -= len(idle)
        self._idle_since[idle] = tick
        self._queue.append((tick, idle))
        self._queued += len(idle)
        if self._queued > 2 * self.num_pages + 64:
            self._compact()

    def oldest(self) -> int | None:
        """When the page that is to be forgotten next was let go; None: all are in use."""
        while self._queue:
            tick, pages = self._queue[0]
            if (self._idle_since[pages] == tick).any():
                return tick
            self._queue.popleft()
            self._queued -= len(pages)
        return None

    def take_oldest(self, count: int) -> Int32Array:
        """Forgets up to `count` of the pages that were let go first, together; `oldest` has said that there are
        some."""
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
        """Pages without a user, which leave the cache."""
        self.num_pages -= len(pages)
        self._is_cached[pages] = False
        self._idle_since[pages] = 0

    def check(self, cached: Int32Array, in_use: Int32Array) -> None:
        """Raises AssertionError unless `cached` are the pages of the cache and `in_use` its users' pages, each as often
        as it has users."""
        expected = np.bincount(in_use, minlength=len(self._pins))
        assert np.array_equal(expected, self._pins), "users of cached pages are miscounted"
        assert np.array_equal(np.sort(cached), np.flatnonzero(self._is_cached)), "cached pages are misknown"
        assert len(cached) == self.num_pages, "cached pages are miscounted"
        assert int((self._pins > 0).sum()) == self.num_pinned, "pages in use are miscounted"
        idle = self._is_cached & (self._pins == 0)
        assert np.array_equal(idle, self._idle_since > 0), "a page is idle and has no place in the order, or has one"
        queued = {(tick, page) for tick, pages in self._queue for page in pages.tolist()}
        assert all((self._idle_since[page], page) in queued for page in np.flatnonzero(idle)), "an idle page is lost"

    def _compact(self) -> None:
        kept = ((tick, pages[self._idle_since[pages] == tick]) for tick, pages in self._queue)
        self._queue = deque((tick, pages) for tick, pages in kept if len(pages))
        self._queued = sum(len(pages) for _, pages in self._queue)
