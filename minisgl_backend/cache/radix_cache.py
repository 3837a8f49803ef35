"""A prefix cache as a radix tree whose edges are whole pages.

The radix tree of KV pages is SGLang's idea (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
Model Programs", section 3). Here an edge holds any number of whole pages, and children are keyed by the tokens of their
first page, so a node is split only at a page boundary. The salt is part of the key of a prompt's first page, which
separates all pages after it, too: one root serves all salts.

A node holds the pages of every cache group. In groups without a window none is missing, and eviction shortens a node
from its end. In groups with a window there are holes (page 0) where a page was given back or evicted, independently of
the pages around it: a prefix is usable as far as the token after it finds all pages that it sees. If all groups have
windows, a node is removed when only holes are left.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from minisgl_backend.arrays import NO_INT32, IdArray, Int32Array
from minisgl_backend.cache.changes import CacheChange, PagesRemoved, PagesStored, page_hashes
from minisgl_backend.cache.content_ids import id_bytes
from minisgl_backend.cache.prefix_cache import PrefixCache, PrefixMatch
from minisgl_backend.cache.window_pages import WindowPages
from minisgl_backend.kv.groups import CacheGroups
from minisgl_backend.kv.kinds import FULL


class RadixNode:
    """One edge of the tree with the node at its lower end. Only `RadixCache` uses it."""

    __slots__ = ("children", "hashes", "key", "pages", "parent", "pins", "serial", "token_ids", "used_at")

    def __init__(
        self, parent: RadixNode | None, key: bytes, token_ids: IdArray, pages: Int32Array, serial: int
    ) -> None:
        self.parent = parent  # None: the root, or a node removed from the tree
        self.key = key  # its key in the parent's children
        self.token_ids = token_ids  # [num_pages * page_size]
        self.pages = pages  # [num_groups, num_pages]; 0: a hole
        self.hashes: list[int] = []  # [num_pages], if changes are recorded
        self.children: dict[bytes, RadixNode] = {}  # by the salt and the tokens of the child's first page
        self.pins = 0  # pins on this node or below it
        self.used_at = 0  # tick of the last match or unpin on a path through this node
        self.serial = serial  # breaks ties, so that the eviction order is the same in every run

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]  # in each group, holes included


class RadixCache(PrefixCache[RadixNode]):
    """See the module. A match costs the depth of the path plus one comparison of its tokens; evicting a leaf costs
    O(log n): the heap holds unpinned leaves, and outdated entries are dropped when they reach the top."""

    def __init__(
        self, page_size: int, *, groups: CacheGroups | None = None, num_pages: int = 0, record_changes: bool = False
    ) -> None:
        """`num_pages`: page ids are 1 to num_pages; only groups with windows need it. `record_changes`: for
        `take_changes`, which must then be called regularly."""
        self._page_size = page_size
        self._groups = groups = groups or CacheGroups((FULL,), page_size)
        self._num_full = groups.num_full
        self._windows = WindowPages(num_pages) if groups.num_windows else None
        self._holders = np.empty(num_pages + 1, dtype=object)  # page id -> its node, for groups with windows
        self._none: Int32Array = np.zeros((groups.num_pages, 0), dtype=np.int32)
        self._records = record_changes
        self._changes: list[CacheChange] = []
        self._serials = itertools.count()
        self._root = RadixNode(None, b"", NO_INT32, self._none, next(self._serials))
        self._tick = 0
        self._leaves: list[tuple[int, int, RadixNode]] = []  # heap of (used_at, serial, node), lazily cleaned
        self._num_nodes = 0
        self._num_columns = 0  # pages per group without a window: in the tree,
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
        return self._path(token_ids, salt)[1]

    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[RadixNode]:
        self._tick += 1
        path, end = self._path(token_ids, salt)
        node, position = self._root, 0
        runs: list[Int32Array] = []
        for child in path:
            if position == end:
                break
            node = child if position + child.num_pages <= end else self._split(child, end - position)
            node.used_at = self._tick
            runs.append(node.pages)
            position += node.num_pages
        self._pin(node, self._root)
        if self._windows is None or not runs:
            pages = self._joined(runs)
        else:
            pages = np.concatenate(runs, axis=1)  # a copy
            seen = pages[self._num_full :]
            seen[np.arange(end) < self._groups.first_needed(np.full(1, end, np.int32))] = 0
            self._windows.pin(seen[seen > 0])
        return PrefixMatch(pages, node, salt)

    def unpin(self, pin: RadixNode) -> None:
        self._tick += 1
        node: RadixNode | None = pin
        while node is not self._root:
            assert node is not None, "a pinned node stays in the tree"
            assert node.pins > 0, "a pin ends once"
            node.pins -= 1
            node.used_at = self._tick
            parent = node.parent
            if node.pins == 0:
                self._num_pinned -= node.num_pages
                if not node.children:
                    self._note_leaf(node)
            node = parent

    def let_go(self, pages: Int32Array) -> None:
        if self._windows is not None and len(pages):
            self._tick += 1
            self._windows.let_go(pages, self._tick)

    def extend(
        self, pin: RadixNode, token_ids: IdArray, pages: Int32Array, salt: bytes = b""
    ) -> PrefixMatch[RadixNode]:
        self._tick += 1
        node, position, runs = pin, 0, []
        count = pages.shape[1]
        if self._windows is None and count and (key := self._key(pin, token_ids, 0, salt)) not in pin.children:
            node = self._add_leaf(pin, key, token_ids, pages, salt)  # the common case: none of the new tokens is known
            node.used_at = self._tick
            self._pin(node, pin)
            return PrefixMatch(pages, node, salt)
        while position < count:
            key = self._key(node, token_ids, position, salt)
            child = node.children.get(key)
            if child is None:
                child = self._add_leaf(node, key, token_ids[position * self._page_size :], pages[:, position:], salt)
                common = child.num_pages
            else:
                common = self._common_pages(child, token_ids, position)
                if common < child.num_pages:
                    child = self._split(child, common)
            child.used_at = self._tick
            runs.append(
                child.pages if self._windows is None else self._use(child, pages[:, position : position + common])
            )
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
            if since is not None and (leaf is None or since <= leaf.used_at):
                pages = self._punch(missing)
            elif leaf is not None:
                pages = self._shorten(leaf, missing)
            else:
                break
            evicted.append(pages)
            missing -= len(pages)
        if len(evicted) == 1:
            return evicted[0]
        return np.concatenate(evicted) if evicted else NO_INT32

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
            assert node.num_pages > 0, "an edge without pages"
            assert len(node.token_ids) == node.num_pages * self._page_size, "an edge's tokens do not fill its pages"
            assert (node.pages[: self._num_full] > 0).all(), "a hole where there is no window"
            assert node.pins == expected.get(node.serial, 0), "a node's pins differ from the pins that are out"
            assert node.parent is not None, "a node in the tree has no parent"
            assert node.parent.children.get(node.key) is node, "a child is filed under a wrong key"
            first = self._key(node.parent, node.token_ids, 0, b"")
            assert node.key.endswith(first), "a key is not of the first page"
            if not node.children and not node.pins:
                assert node.pages.any(), "a leaf of holes"
                assert not self._num_full or node.serial in listed, "an evictable leaf is not in the heap"
            for page in node.pages[self._num_full :].flat:
                assert not page or self._holders[page] is node, "a page and its node disagree"
        pages = self.pages()
        assert len(np.unique(pages)) == len(pages) == self.num_pages, "a page is in the tree twice or miscounted"
        assert sum(node.num_pages for node in nodes) == self._num_columns, "pages are miscounted"
        assert sum(node.num_pages for node in nodes if node.pins) == self._num_pinned, "pinned pages are miscounted"
        assert len(nodes) == self._num_nodes, "nodes are miscounted"
        if self._windows is not None:
            runs = [node.pages[self._num_full :].reshape(-1) for node in nodes]
            held = np.concatenate(runs) if runs else NO_INT32
            self._windows.check(held[held > 0], in_use)

    def _path(self, token_ids: IdArray, salt: bytes) -> tuple[list[RadixNode], int]:
        """The nodes that hold a prefix of `token_ids`, and how many of their pages are usable."""
        path: list[RadixNode] = []
        node, position, count = self._root, 0, len(token_ids) // self._page_size
        while position < count:
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                break
            common = self._common_pages(child, token_ids, position)
            path.append(child)
            position += common
            if common < child.num_pages:
                break
            node = child
        if self._windows is not None and path:
            return path, self._usable(np.concatenate([node.pages for node in path], axis=1)[:, :position])
        return path, position

    def _usable(self, pages: Int32Array) -> int:
        """Length of the longest prefix of a path's pages after which a token finds all pages that it sees."""
        seen, columns = pages[self._num_full :], np.arange(pages.shape[1], dtype=np.int32)
        last_hole = np.maximum.accumulate(np.where(seen == 0, columns, -1), axis=1)
        # -1: no hole. A prefix shorter than a window is seen whole.
        ends = np.flatnonzero((last_hole < np.maximum(self._groups.first_needed(columns + 1), 0)).all(axis=0))
        return int(ends[-1]) + 1 if len(ends) else 0

    def _use(self, node: RadixNode, own: Int32Array) -> Int32Array:
        """What `extend` returns for one node, where groups have windows; `own` are the caller's pages with its
        tokens."""
        assert self._windows is not None, "there are such groups"
        theirs, own = node.pages[self._num_full :], own[self._num_full :]
        fills = (theirs == 0) & (own > 0)
        if fills.any():
            theirs[fills] = own[fills]
            self._hold(node, own[fills])
        kept = np.where(own > 0, theirs, 0)
        self._windows.pin(kept[kept > 0])
        return np.concatenate([node.pages[: self._num_full], kept])

    def _hold(self, node: RadixNode, pages: Int32Array) -> None:
        """Records the node of pages of groups with windows that are new in the cache."""
        assert self._windows is not None, "pages of groups with windows"
        self._holders[pages] = node
        self._windows.add(pages)

    def _joined(self, runs: list[Int32Array]) -> Int32Array:
        """The pages of a path, [num_groups, num_pages]; those of one node are not copied."""
        if len(runs) == 1:
            return runs[0]
        return np.concatenate(runs, axis=1) if runs else self._none

    def _oldest_leaf(self) -> RadixNode | None:
        """The next leaf to evict, the first of the heap."""
        while self._leaves:
            used_at, _, node = self._leaves[0]
            if node.parent is not None and not node.pins and not node.children and node.used_at == used_at:
                return node
            heapq.heappop(self._leaves)
        return None

    def _shorten(self, leaf: RadixNode, missing: int) -> Int32Array:
        """Evicts the end of a leaf, the first of the heap: the rest of its pages stay useful as a prefix."""
        size = leaf.num_pages
        kept = max(size - -(-missing // self._num_full), 0)
        evicted = leaf.pages[:, kept:].reshape(-1)
        if self._windows is not None:
            ends = leaf.pages[self._num_full :, kept:]
            self._windows.forget(ends[ends > 0])
            evicted = evicted[evicted > 0]
        self._num_columns -= size - kept
        if self._records:
            self._changes.append(PagesRemoved(leaf.hashes[kept:]))
            del leaf.hashes[kept:]
        if kept:
            leaf.pages = leaf.pages[:, :kept]
            leaf.token_ids = leaf.token_ids[: kept * self._page_size]
        else:
            heapq.heappop(self._leaves)
            parent = leaf.parent
            self._remove_leaf(leaf)
            if parent is not None and parent is not self._root and not parent.children and not parent.pins:
                self._note_leaf(parent)
        return evicted

    def _punch(self, missing: int) -> Int32Array:
        """Evicts pages of groups with windows, anywhere in the tree."""
        assert self._windows is not None, "there are such groups"
        evicted = rest = self._windows.take_oldest(missing)
        while len(rest):
            node: RadixNode = self._holders[rest[0]]
            windows = node.pages[self._num_full :]
            hit = np.isin(windows, rest)
            rest = rest[~np.isin(rest, windows[hit])]
            windows[hit] = 0
            if not self._num_full and not node.children and not node.pins:
                self._note_leaf(node)
        return evicted

    def _note_leaf(self, node: RadixNode) -> None:
        """Queues a node without children and pins for eviction, or removes it once it is all holes (all groups
        windowed)."""
        if self._num_full:
            self._push_leaf(node)
            return
        while node is not self._root and not (node.children or node.pins or node.pages.any()):
            parent = node.parent
            assert parent is not None, "the way up ends at the root"
            self._num_columns -= node.num_pages
            if self._records:
                self._changes.append(PagesRemoved(node.hashes))
            self._remove_leaf(node)
            node = parent

    def _key(self, parent: RadixNode, token_ids: IdArray, page: int, salt: bytes) -> bytes:
        """The key, in `parent`'s children, of a child that begins with this page."""
        ids = token_ids[page * self._page_size : (page + 1) * self._page_size]
        key = ids.tobytes() if ids.dtype == np.int32 else id_bytes(ids)
        return salt + key if salt and parent is self._root else key

    def _common_pages(self, node: RadixNode, token_ids: IdArray, page: int) -> int:
        """Number of whole pages that the edge shares with `token_ids` from `page` on; the first page is known to be
        equal."""
        if node.num_pages == 1:
            return 1
        start = page * self._page_size
        size = min(len(node.token_ids), (len(token_ids) - start) // self._page_size * self._page_size)
        differs = node.token_ids[:size] != token_ids[start : start + size]
        first = int(differs.argmax())
        return (first if differs[first] else size) // self._page_size

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Moves the first `count` pages of an edge to a new node above it, which is returned.

        The node itself keeps the lower part, since pins point to it and must still protect the whole path.
        """
        assert node.parent is not None, "the root has no edge to split"
        border = count * self._page_size
        upper = RadixNode(node.parent, node.key, node.token_ids[:border], node.pages[:, :count], next(self._serials))
        upper.pins, upper.used_at = node.pins, node.used_at
        upper.hashes, node.hashes = node.hashes[:count], node.hashes[count:]
        node.parent.children[upper.key] = upper
        node.parent, node.token_ids, node.pages = upper, node.token_ids[border:], node.pages[:, count:]
        if self._windows is not None:
            moved = upper.pages[self._num_full :]
            self._holders[moved[moved > 0]] = upper
        node.key = self._key(upper, node.token_ids, 0, b"")
        upper.children[node.key] = node
        self._num_nodes += 1
        return upper

    def _add_leaf(self, parent: RadixNode, key: bytes, token_ids: IdArray, pages: Int32Array, salt: bytes) -> RadixNode:
        leaf = RadixNode(parent, key, token_ids.copy(), pages.copy(), next(self._serials))
        parent.children[key] = leaf
        if self._records:
            before, own = (parent.hashes[-1], b"") if parent is not self._root else (None, salt)
            leaf.hashes = page_hashes(before, leaf.token_ids, self._page_size, own)
            self._changes.append(PagesStored(list(leaf.hashes), before, leaf.token_ids, own))
        self._num_nodes += 1
        self._num_columns += pages.shape[1]
        if self._windows is not None:
            held = leaf.pages[self._num_full :]
            self._hold(leaf, held[held > 0])
        return leaf

    def _remove_leaf(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[node.key]
        node.parent = None
        self._num_nodes -= 1

    def _pin(self, node: RadixNode, end: RadixNode) -> None:
        """Adds a pin to every node from `node` up to its ancestor `end`, which is excluded."""
        while node is not end:
            if node.pins == 0:
                self._num_pinned += node.num_pages
            node.pins += 1
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
