"""A prefix cache as a radix tree whose edges are whole pages.

The radix tree of KV pages is SGLang's idea (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
Model Programs", section 3). Here an edge holds any number of whole pages, and children are keyed by the tokens of their
first page, so a node is split only at a page boundary. The salt is part of the key of a prompt's first page, which
separates all pages after it, too: one root serves all salts.

A node holds the pages of every cache group. In groups without a window none is missing, and eviction shortens a node
from its end. In groups with a window there are holes (page 0) where a page was given back or evicted, independently of
the pages around it: a prefix is usable as far as the token after it finds all pages that it sees. If all groups have
windows, a node is removed when only holes are left.

Of a model with states a prefix is usable as far as there is a state behind it. Pages of a leaf behind its deepest state
cannot be used: they are evicted first. Until then they tell a second prompt where to leave a state.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from minisgl_backend.arrays import NO_INT32, IdArray, Int32Array
from minisgl_backend.cache.changes import CacheChange, PagesRemoved, PagesStored, page_hashes
from minisgl_backend.cache.content_ids import id_bytes
from minisgl_backend.cache.prefix_cache import PrefixCache, PrefixMatch
from minisgl_backend.cache.radix_node import RadixNode
from minisgl_backend.cache.state_slots import PROVED, StateSlots
from minisgl_backend.cache.window_pages import WindowPages
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL

DEAD = 1 << 62  # subtracted from the tick of pages that no match can use


class PrefixPool(Protocol):
    """What tokens need of a prefix, in a pool that can lose it."""

    def prefix_end(self, path: Sequence[RadixNode], most: int) -> int:
        """Columns of the longest prefix of a path, at most `most`, behind which a token finds all that it needs of this
        pool."""


class RadixCache(PrefixCache[RadixNode]):
    """See the module. A match costs the depth of the path plus one comparison of its tokens; evicting a leaf costs
    O(log n): the heap holds unpinned leaves, and outdated entries are dropped when they reach the top."""

    def __init__(
        self,
        page_size: int,
        *,
        groups: CacheGroups | None = None,
        num_pages: int = 0,
        record_changes: bool = False,
        states: StateSlots | None = None,
    ) -> None:
        """`num_pages`: page ids are 1 to num_pages; only groups with windows need it. `record_changes`: for
        `take_changes`, which must then be called regularly. `states`: of a model with states."""
        self._page_size = page_size
        groups = groups or CacheGroups((FULL,), page_size)
        self._num_full = groups.num_full
        self._windows = WindowPages(groups, num_pages) if groups.num_windows else None
        self._states = states
        self._pools: list[PrefixPool] = [pool for pool in (self._windows, states) if pool is not None]
        self._none: Int32Array = np.zeros((groups.num_pages, 0), dtype=np.int32)
        self._records = record_changes
        self._changes: list[CacheChange] = []
        self._serials = itertools.count()
        self._root = RadixNode(None, b"", NO_INT32, self._none, next(self._serials))
        self._tick = 0
        self._leaves: list[tuple[int, int, RadixNode]] = []  # heap of (used_at, serial, node), lazily cleaned
        self._num_nodes = 0
        self._num_columns = 0  # in the tree,
        self._num_pinned = 0  # and on pinned paths

    @property
    def num_pages(self) -> int:
        full = self._num_full * self._num_columns
        return full if self._windows is None else full + self._windows.num_pages

    @property
    def num_evictable(self) -> int:
        full = self._num_full * (self._num_columns - self._num_pinned)
        windows = self._windows
        return full if windows is None else full + windows.num_pages - windows.num_pinned

    def peek(self, token_ids: IdArray, salt: bytes = b"") -> int:
        return self._prefix_end(*self._path(token_ids, salt))

    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[RadixNode]:
        self._tick += 1
        path, found = self._path(token_ids, salt)
        end = self._prefix_end(path, found)
        known = 0
        if self._states is not None:
            known = self._windows.prefix_end(path, found) if self._windows is not None and found else found
        node, position = self._root, 0
        runs: list[Int32Array] = []
        for child in path:
            if position == end:
                break
            node = child if position + child.num_columns <= end else self._split(child, end - position)
            node.use(self._tick)
            runs.append(node.pages)
            position += node.num_columns
        self._pin(node, self._root)
        pages = self._joined(runs)
        if self._windows is not None and runs:
            pages = pages.copy() if len(runs) == 1 else pages
            self._windows.pin_seen(pages)
        if self._states is None:
            return PrefixMatch(pages, node, salt)
        state = self._states.pin_end(path[: len(runs) - 1], node) if runs else 0
        return PrefixMatch(pages, node, salt, state, known)

    def unpin(self, pin: RadixNode) -> None:
        self._tick += 1
        node: RadixNode | None = pin
        while node is not self._root:
            assert node is not None, "a pinned node stays in the tree"
            parent = node.parent
            if node.unpin(self._tick):
                self._num_pinned -= node.num_columns
                if not node.children:
                    self._note_leaf(node)
            node = parent

    def unref(self, pages: Int32Array) -> None:
        if self._windows is not None and len(pages):
            self._tick += 1
            self._windows.unref(pages, self._tick)

    def extend(
        self, pin: RadixNode, token_ids: IdArray, pages: Int32Array, salt: bytes = b""
    ) -> PrefixMatch[RadixNode]:
        self._tick += 1
        node, position, runs = pin, 0, []
        count = pages.shape[1]
        if self._windows is None and count and (key := self._key(pin, token_ids, 0, salt)) not in pin.children:
            node = self._add_leaf(pin, key, token_ids, pages, salt)  # the common case: none of the new tokens is known
            node.use(self._tick)
            self._pin(node, pin)
            return PrefixMatch(pages, node, salt)
        while position < count:
            key = self._key(node, token_ids, position, salt)
            child = node.children.get(key)
            if child is None:
                child = self._add_leaf(node, key, token_ids[position * self._page_size :], pages[:, position:], salt)
                common = child.num_columns
            else:
                common = child.common_columns(token_ids[position * self._page_size :], self._page_size)
                if common < child.num_columns:
                    child = self._split(child, common)
            child.use(self._tick)
            own = pages[:, position : position + common]
            runs.append(child.pages if self._windows is None else self._windows.share(child, own))
            position += common
            node = child
        self._pin(node, pin)
        return PrefixMatch(self._joined(runs), node, salt)

    def evict(self, count: int) -> Int32Array:
        evicted: list[Int32Array] = []
        missing = count
        while missing > 0:
            leaf = self._oldest_leaf()
            since = self._windows.oldest() if self._windows is not None else None
            if self._windows is not None and since is not None and (leaf is None or since <= leaf.used_at):
                pages, nodes = self._windows.evict(missing)
                for node in () if self._num_full else nodes:
                    if not node.children and not node.pins:
                        self._note_leaf(node)
            elif leaf is not None:
                pages = self._shorten(leaf, missing)
            else:
                break
            evicted.append(pages)
            missing -= len(pages)
        if len(evicted) == 1:
            return evicted[0]
        return np.concatenate(evicted) if evicted else NO_INT32

    def keep_state(self, pin: RadixNode, behind: int, slot: int, hits: int) -> bool:
        if self._states is None:
            return False
        node, column = pin.column_before(behind)
        if known := int(node.states[column]):
            if hits >= PROVED:
                self._states.prove(known)
            return False
        node.keep_state(column, slot)
        self._states.add(slot, node, hits)
        return True

    def drop_state(self, slot: int) -> None:
        assert self._states is not None, "a state is dropped that is cached"
        node = self._states.forget(slot)
        node.drop_state(slot)
        if node.is_idle_leaf:
            self._sink(node)

    def evict_state(self, *, proved: bool) -> bool:
        slot = 0 if self._states is None else self._states.next_evicted(proved=proved)
        if slot:
            self.drop_state(slot)
        return slot > 0

    def pages(self) -> Int32Array:
        runs = [node.pages for node in self._nodes()]
        pages = np.concatenate(runs, axis=1) if runs else self._none
        return pages[pages > 0]

    def take_changes(self) -> list[CacheChange]:
        changes, self._changes = self._changes, []
        return changes

    def check(self, pins: list[RadixNode], in_use: Int32Array = NO_INT32) -> None:
        expected: dict[int, int] = {}
        for pin in pins:
            node: RadixNode | None = pin
            while node is not None and node is not self._root:
                expected[node.serial] = expected.get(node.serial, 0) + 1
                node = node.parent
            assert node is self._root, "a pinned node has left the tree"
        nodes = self._nodes()
        listed = {entry[2].serial for entry in self._leaves if entry[2].used_at == entry[0]}
        for node in nodes:
            assert node.num_columns > 0, "an edge without pages"
            assert len(node.token_ids) == node.num_columns * self._page_size, "an edge's tokens do not fill its pages"
            assert (node.pages[: self._num_full] > 0).all(), "a hole where there is no window"
            assert node.pins == expected.get(node.serial, 0), "a node's pins differ from the pins that are out"
            assert node.parent is not None, "a node in the tree has no parent"
            assert node.parent.children.get(node.key) is node, "a child is filed under a wrong key"
            first = self._key(node.parent, node.token_ids, 0, b"")
            assert node.key.endswith(first), "a key is not of the first page"
            if not node.children and not node.pins:
                assert node.pages.any(), "a leaf of holes"
                assert not self._num_full or node.serial in listed, "an evictable leaf is not in the heap"
        pages = self.pages()
        assert len(np.unique(pages)) == len(pages) == self.num_pages, "a page is in the tree twice or miscounted"
        assert sum(node.num_columns for node in nodes) == self._num_columns, "pages are miscounted"
        assert sum(node.num_columns for node in nodes if node.pins) == self._num_pinned, "pinned pages are miscounted"
        assert len(nodes) == self._num_nodes, "nodes are miscounted"
        if self._windows is not None:
            self._windows.check(nodes, in_use)
        if self._states is not None:
            self._states.check(nodes)
            for node in nodes:
                dead = node.is_idle_leaf and node.num_reached < node.num_columns
                assert not dead or not self._num_full or (node.used_at < 0 and not node.num_reached), "dead pages stay"

    def _path(self, token_ids: IdArray, salt: bytes) -> tuple[list[RadixNode], int]:
        """The nodes that hold a prefix of `token_ids`, and how many of their columns."""
        path: list[RadixNode] = []
        node, position, count = self._root, 0, len(token_ids) // self._page_size
        while position < count:
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                break
            common = child.common_columns(token_ids[position * self._page_size :], self._page_size)
            path.append(child)
            position += common
            if common < child.num_columns:
                break
            node = child
        return path, position

    def _prefix_end(self, path: list[RadixNode], end: int) -> int:
        """Where a path's longest prefix ends that no pool lacks anything of. A pool that has its all behind one prefix
        may lack something behind a shorter one: the shortest answer is asked again of all."""
        while end and (shortest := min((pool.prefix_end(path, end) for pool in self._pools), default=end)) < end:
            end = shortest
        return end

    def _joined(self, runs: list[Int32Array]) -> Int32Array:
        """The pages of a path, [num_groups, num_pages]; those of one node are not copied."""
        if len(runs) == 1:
            return runs[0]
        return np.concatenate(runs, axis=1) if runs else self._none

    def _oldest_leaf(self) -> RadixNode | None:
        """The next leaf to evict, the first of the heap."""
        while self._leaves:
            used_at, _, node = self._leaves[0]
            if node.is_idle_leaf and node.used_at == used_at:
                return node
            heapq.heappop(self._leaves)
        return None

    def _shorten(self, leaf: RadixNode, missing: int) -> Int32Array:
        """Evicts the end of a leaf, the first of the heap: the rest of its pages stay useful as a prefix."""
        size = leaf.num_columns
        kept = max(size - -(-missing // self._num_full), 0)
        evicted = leaf.pages[:, kept:].reshape(-1)
        if self._windows is not None:
            ends = self._windows.of(leaf.pages[:, kept:])
            self._windows.forget(ends[ends > 0])
            evicted = evicted[evicted > 0]
        if self._states is not None:
            self._states.forget_all(leaf.states[kept:])
        self._num_columns -= size - kept
        if self._records:
            self._changes.append(PagesRemoved(leaf.hashes[kept:]))
        if kept:
            leaf.cut(kept, self._page_size)
            self._sink(leaf)
        else:
            heapq.heappop(self._leaves)
            if (parent := self._remove_leaf(leaf)).is_idle_leaf:
                self._note_leaf(parent)
        return evicted

    def _note_leaf(self, node: RadixNode) -> None:
        """Queues a node without children and pins for eviction, or removes it once it is all holes (all groups
        windowed)."""
        if self._num_full:
            if not self._sink(node):
                self._push_leaf(node)
            return
        while node is not self._root and not (node.children or node.pins or node.pages.any()):
            self._num_columns -= node.num_columns
            if self._states is not None:
                self._states.forget_all(node.states)
            if self._records:
                self._changes.append(PagesRemoved(node.hashes))
            node = self._remove_leaf(node)

    def _sink(self, leaf: RadixNode) -> bool:
        """Queues a leaf's pages behind its deepest state before all others. False: there are none, or they are queued
        so already."""
        if self._states is None or not self._num_full or leaf.used_at < 0:
            return False
        if (reached := leaf.num_reached) == leaf.num_columns:
            return False
        if reached:
            self._split(leaf, reached)
        leaf.use(leaf.used_at - DEAD)
        self._push_leaf(leaf)
        return True

    def _key(self, parent: RadixNode, token_ids: IdArray, page: int, salt: bytes) -> bytes:
        """The key, in `parent`'s children, of a child that begins with this page."""
        ids = token_ids[page * self._page_size : (page + 1) * self._page_size]
        key = ids.tobytes() if ids.dtype == np.int32 else id_bytes(ids)
        return salt + key if salt and parent is self._root else key

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """See `RadixNode.split`."""
        upper = node.split(count, self._page_size, self._key(node, node.token_ids, count, b""), next(self._serials))
        if self._windows is not None:
            self._windows.move(upper)
        if self._states is not None:
            self._states.move(upper)
        self._num_nodes += 1
        return upper

    def _add_leaf(self, parent: RadixNode, key: bytes, token_ids: IdArray, pages: Int32Array, salt: bytes) -> RadixNode:
        token_ids, hashes = token_ids.copy(), None
        if self._records:
            before, own = (parent.hashes[-1], b"") if parent is not self._root else (None, salt)
            hashes = page_hashes(before, token_ids, self._page_size, own)
            self._changes.append(PagesStored(list(hashes), before, token_ids, own))
        states = NO_INT32 if self._states is None else np.zeros(pages.shape[1], dtype=np.int32)
        leaf = RadixNode(parent, key, token_ids, pages.copy(), next(self._serials), hashes, states)
        parent.add(leaf)
        self._num_nodes += 1
        self._num_columns += pages.shape[1]
        if self._windows is not None:
            self._windows.add(leaf)
        return leaf

    def _remove_leaf(self, node: RadixNode) -> RadixNode:
        self._num_nodes -= 1
        return node.remove()

    def _pin(self, node: RadixNode, end: RadixNode) -> None:
        """Adds a pin to every node from `node` up to its ancestor `end`, which is excluded."""
        while node is not end:
            if node.pin():
                self._num_pinned += node.num_columns
            assert node.parent is not None, "the way up ends at the pinned ancestor"
            node = node.parent

    def _push_leaf(self, node: RadixNode) -> None:
        heapq.heappush(self._leaves, (node.used_at, node.serial, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            alive = (leaf for leaf in self._nodes() if not leaf.children and not leaf.pins)
            self._leaves = [(leaf.used_at, leaf.serial, leaf) for leaf in alive]
            heapq.heapify(self._leaves)

    def _nodes(self) -> list[RadixNode]:
        found, stack = [], [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            found.append(node)
        return found[1:]
