"""Cached pages of which rows keep only those in a window or a chunk: how many rows use each, and the order of eviction.

A row uses a page while its next token sees it, so these pages are pinned one by one instead of by path. Arrays are
indexed by page id.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.cache.radix_node import RadixNode
from minisgl_backend.kv.groups import CacheGroups


class WindowPages:
    """Least recently used first: the page that was released first is evicted first."""

    def __init__(self, groups: CacheGroups, num_pages: int) -> None:
        self._groups = groups
        self.num_pages = 0  # cached pages, pinned or not
        self.num_pinned = 0
        self._nodes = np.empty(num_pages + 1, dtype=object)  # the node of a cached page
        self._is_cached = np.zeros(num_pages + 1, dtype=np.bool_)
        self._pins = np.zeros(num_pages + 1, dtype=np.int32)
        self._idle_since = np.zeros(num_pages + 1, dtype=np.int64)  # tick of the last `unref`; 0: pinned, or not cached
        self._queue: deque[tuple[int, Int32Array]] = deque()  # (tick, pages released then), lazily cleaned
        self._queued = 0  # total length of the queue's arrays

    def of(self, pages: Int32Array) -> Int32Array:
        """Those of columns' pages, [pages of a column, num_columns], that windows and chunks have; a view."""
        return pages[self._groups.num_full :]

    def prefix_end(self, path: Sequence[RadixNode], most: int) -> int:
        """Columns of the longest prefix of a path, at most `most`, after which a token finds all pages that it sees."""
        seen = self.of(np.concatenate([node.pages for node in path], axis=1)[:, :most])
        columns = np.arange(most, dtype=np.int32)
        last_hole = np.maximum.accumulate(np.where(seen == 0, columns, -1), axis=1)
        # -1: no hole. A prefix shorter than a window is seen whole.
        ends = np.flatnonzero((last_hole < np.maximum(self._groups.first_needed(columns + 1), 0)).all(axis=0))
        return int(ends[-1]) + 1 if len(ends) else 0

    def pin_seen(self, pages: Int32Array) -> None:
        """Pins what the token behind a prefix with these pages sees, and sets its other pages to 0."""
        seen, end = self.of(pages), pages.shape[1]
        seen[np.arange(end) < self._groups.first_needed(np.full(1, end, np.int32))] = 0
        self._pin(seen[seen > 0])

    def share(self, node: RadixNode, own: Int32Array) -> Int32Array:
        """Pins the node's pages where a row has pages, `own`, with the same tokens; where the node has a hole, it takes
        the row's. Returns all pages of the node, and 0 where the row has none."""
        theirs, mine = self.of(node.pages), self.of(own)
        fills = (theirs == 0) & (mine > 0)
        if fills.any():
            theirs[fills] = mine[fills]
            self._add(node, mine[fills])
        shared = np.where(mine > 0, theirs, 0)
        self._pin(shared[shared > 0])
        return np.concatenate([node.pages[: self._groups.num_full], shared])

    def add(self, node: RadixNode) -> None:
        """Adds the pages of a new node, which are pinned at once."""
        held = self.of(node.pages)
        self._add(node, held[held > 0])

    def move(self, node: RadixNode) -> None:
        """These pages of a node were another's."""
        held = self.of(node.pages)
        self._nodes[held[held > 0]] = node

    def unref(self, pages: Int32Array, tick: int) -> None:
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
            kept = ((then, pages[self._idle_since[pages] == then]) for then, pages in self._queue)
            self._queue = deque((then, pages) for then, pages in kept if len(pages))
            self._queued = sum(len(pages) for _, pages in self._queue)

    def oldest(self) -> int | None:
        """The tick at which the next page to evict was released; None: all pages are in use."""
        while self._queue:
            tick, pages = self._queue[0]
            if (self._idle_since[pages] == tick).any():
                return tick
            self._queue.popleft()
            self._queued -= len(pages)
        return None

    def evict(self, count: int) -> tuple[Int32Array, list[RadixNode]]:
        """Evicts up to `count` of the pages with the `oldest` tick, of which there must be some, anywhere in the tree.
        Returns them and their nodes, which have holes there."""
        tick, pages = self._queue.popleft()
        self._queued -= len(pages)
        pages = pages[self._idle_since[pages] == tick]
        if len(pages) > count:
            self._queue.appendleft((tick, pages[count:]))
            self._queued += len(pages) - count
            pages = pages[:count]
        self.forget(pages)
        nodes: list[RadixNode] = []
        rest = pages
        while len(rest):
            nodes.append(self._nodes[rest[0]])
            held = self.of(nodes[-1].pages)
            hit = np.isin(held, rest)
            rest = rest[~np.isin(rest, held[hit])]
            held[hit] = 0
        return pages, nodes

    def forget(self, pages: Int32Array) -> None:
        """Removes pages without a user from the cache."""
        self.num_pages -= len(pages)
        self._is_cached[pages] = False
        self._idle_since[pages] = 0

    def check(self, nodes: Sequence[RadixNode], in_use: Int32Array) -> None:
        """Raises AssertionError unless the pages of `nodes` are the cached ones and `in_use` the pages in use, once for
        each user."""
        for node in nodes:
            for page in self.of(node.pages).flat:
                assert not page or self._nodes[page] is node, "a page and its node disagree"
        runs = [self.of(node.pages).reshape(-1) for node in nodes]
        cached = np.concatenate(runs) if runs else NO_INT32
        cached = cached[cached > 0]
        expected = np.bincount(in_use, minlength=len(self._pins))
        assert np.array_equal(expected, self._pins), "users of cached pages are miscounted"
        assert np.array_equal(np.sort(cached), np.flatnonzero(self._is_cached)), "cached pages are misknown"
        assert len(cached) == self.num_pages, "cached pages are miscounted"
        assert int((self._pins > 0).sum()) == self.num_pinned, "pages in use are miscounted"
        idle = self._is_cached & (self._pins == 0)
        assert np.array_equal(idle, self._idle_since > 0), "an idle page is not in the eviction order, or a used one is"
        queued = {(tick, page) for tick, pages in self._queue for page in pages.tolist()}
        assert all((self._idle_since[page], page) in queued for page in np.flatnonzero(idle)), "an idle page is lost"

    def _add(self, node: RadixNode, pages: Int32Array) -> None:
        self.num_pages += len(pages)
        self._nodes[pages] = node
        self._is_cached[pages] = True

    def _pin(self, pages: Int32Array) -> None:
        """Adds a user to each of these pages, no page twice."""
        self.num_pinned += int((self._pins[pages] == 0).sum())
        self._pins[pages] += 1
        self._idle_since[pages] = 0
