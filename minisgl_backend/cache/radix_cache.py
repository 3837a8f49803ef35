"""A prefix cache as a radix tree whose edges are whole pages.

The idea of a radix tree of KV pages is from SGLang (Zheng et al. 2024, "SGLang: Efficient Execution of Structured
Language Model Programs", section 3). Here an edge holds any number of whole pages; children are told apart by the
tokens of their first page, so a node is split only on a page border. A salt is part of the key of a prompt's first
page, and so keeps apart all that follows: there is one root, whatever salts there are.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.cache.changes import CacheChange, PagesRemoved, PagesStored, page_hashes
from minisgl_backend.cache.prefix_cache import PrefixCache, PrefixMatch


class RadixNode:
    """One edge of the tree with the node at its lower end. Only `RadixCache` touches it."""

    __slots__ = ("children", "hashes", "pages", "parent", "pins", "salt", "serial", "token_ids", "used_at")

    def __init__(self, parent: RadixNode | None, token_ids: Int32Array, pages: Int32Array, serial: int) -> None:
        self.parent = parent  # None: the root, or a node that has left the tree
        self.token_ids = token_ids  # [num_pages * page_size]
        self.pages = pages  # [num_pages]
        self.hashes: list[int] = []  # [num_pages], where changes are recorded
        self.salt = b""  # of the prompts that begin here
        self.children: dict[bytes, RadixNode] = {}  # by the salt and the tokens of the child's first page
        self.pins = 0  # pins on this node or below it
        self.used_at = 0  # tick of the last match or unpin that went through here
        self.serial = serial  # breaks ties, so that the eviction order is the same in every run


class RadixCache(PrefixCache[RadixNode]):
    """See the module. A match costs the depth of the path plus one comparison of its tokens; evicting a leaf costs
    O(log n): the heap holds unpinned leaves, and entries that are no longer true are dropped when they surface."""

    def __init__(self, page_size: int, *, record_changes: bool = False) -> None:
        """`record_changes`: for `take_changes`, which then has to be called again and again."""
        self._page_size = page_size
        self._records = record_changes
        self._changes: list[CacheChange] = []
        self._serials = itertools.count()
        self._root = RadixNode(None, NO_INT32, NO_INT32, next(self._serials))
        self._tick = 0
        self._leaves: list[tuple[int, int, RadixNode]] = []  # heap of (used_at, serial, node), lazily cleaned
        self._num_nodes = 0
        self._num_pages = 0
        self._num_pinned = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        return self._num_pages - self._num_pinned

    def peek(self, token_ids: Int32Array, salt: bytes = b"") -> int:
        node, position, count = self._root, 0, len(token_ids) // self._page_size
        while position < count:
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                break
            common = self._common_pages(child, token_ids, position)
            position += common
            if common < len(child.pages):
                break
            node = child
        return position

    def match(self, token_ids: Int32Array, salt: bytes = b"") -> PrefixMatch[RadixNode]:
        self._tick += 1
        node, position, count = self._root, 0, len(token_ids) // self._page_size
        runs: list[Int32Array] = []
        while position < count:
            child = node.children.get(self._key(node, token_ids, position, salt))
            if child is None:
                break
            common = self._common_pages(child, token_ids, position)
            node = child if common == len(child.pages) else self._split(child, common)
            node.used_at = self._tick
            runs.append(node.pages)
            position += common
        self._pin(node, self._root)
        return PrefixMatch(np.concatenate(runs) if runs else NO_INT32, node, salt)

    def unpin(self, pin: RadixNode) -> None:
        self._tick += 1
        node: RadixNode | None = pin
        while node is not self._root:
            assert node is not None, "a pinned node stays in the tree"
            assert node.pins > 0, "a pin ends once"
            node.pins -= 1
            node.used_at = self._tick
            if node.pins == 0:
                self._num_pinned -= len(node.pages)
                if not node.children:
                    self._push_leaf(node)
            node = node.parent

    def extend(
        self, pin: RadixNode, token_ids: Int32Array, pages: Int32Array, salt: bytes = b""
    ) -> PrefixMatch[RadixNode]:
        self._tick += 1
        node, position, runs = pin, 0, []
        while position < len(pages):
            key = self._key(node, token_ids, position, salt)
            child = node.children.get(key)
            if child is None:
                child = self._add_leaf(node, key, token_ids[position * self._page_size :], pages[position:], salt)
                common = len(child.pages)
            else:
                common = self._common_pages(child, token_ids, position)
                if common < len(child.pages):
                    child = self._split(child, common)
            child.used_at = self._tick
            runs.append(child.pages)
            position += common
            node = child
        self._pin(node, pin)
        return PrefixMatch(np.concatenate(runs) if runs else NO_INT32, node)

    def evict(self, count: int) -> Int32Array:
        evicted: list[Int32Array] = []
        missing = count
        while missing > 0 and self._leaves:
            used_at, _, node = self._leaves[0]
            if node.parent is None or node.pins or node.children or node.used_at != used_at:
                heapq.heappop(self._leaves)
                continue
            kept = max(len(node.pages) - missing, 0)  # the end of a long leaf goes first: its prefix stays useful
            evicted.append(node.pages[kept:])
            missing -= len(node.pages) - kept
            self._num_pages -= len(node.pages) - kept
            if self._records:
                self._changes.append(PagesRemoved(node.hashes[kept:]))
                del node.hashes[kept:]
            if kept:
                node.pages = node.pages[:kept]
                node.token_ids = node.token_ids[: kept * self._page_size]
            else:
                heapq.heappop(self._leaves)
                self._remove_leaf(node)
        return np.concatenate(evicted) if evicted else NO_INT32

    def pages(self) -> Int32Array:
        runs = [node.pages for node in self._nodes()]
        return np.concatenate(runs) if runs else NO_INT32

    def take_changes(self) -> list[CacheChange]:
        changes, self._changes = self._changes, []
        return changes

    def check(self, pins: list[RadixNode]) -> None:
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
            assert len(node.pages) > 0, "an edge without pages"
            assert len(node.token_ids) == len(node.pages) * self._page_size, "an edge's tokens do not fill its pages"
            assert node.pins == expected.get(node.serial, 0), "a node's pins differ from the pins that are out"
            assert node.parent is not None, "a node in the tree has no parent"
            assert node.parent.children.get(self._own_key(node)) is node, "a child is filed under a wrong key"
            assert node.children or node.pins or node.serial in listed, "an evictable leaf is not in the heap"
        pages = self.pages()
        assert len(np.unique(pages)) == len(pages) == self._num_pages, "a page is in the tree twice or miscounted"
        assert sum(len(node.pages) for node in nodes if node.pins) == self._num_pinned, "pinned pages are miscounted"
        assert len(nodes) == self._num_nodes, "nodes are miscounted"

    def _key(self, parent: RadixNode, token_ids: Int32Array, page: int, salt: bytes) -> bytes:
        """What a child of `parent` that begins with this page is filed under."""
        key = token_ids[page * self._page_size : (page + 1) * self._page_size].tobytes()
        return salt + key if salt and parent is self._root else key

    def _own_key(self, node: RadixNode) -> bytes:
        assert node.parent is not None, "the root is filed nowhere"
        return self._key(node.parent, node.token_ids, 0, node.salt)

    def _common_pages(self, node: RadixNode, token_ids: Int32Array, page: int) -> int:
        """Whole pages that the edge shares with `token_ids` from `page` on; the first one is known to be equal."""
        if len(node.pages) == 1:
            return 1
        start = page * self._page_size
        size = min(len(node.token_ids), (len(token_ids) - start) // self._page_size * self._page_size)
        differs = node.token_ids[:size] != token_ids[start : start + size]
        first = int(differs.argmax())
        return (first if differs[first] else size) // self._page_size

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Moves the first `count` pages of an edge to a new node above it, and returns that one.

        The node itself keeps the lower end, since pins point to it and must go on to protect the whole path.
        """
        assert node.parent is not None, "the root has no edge to split"
        border = count * self._page_size
        upper = RadixNode(node.parent, node.token_ids[:border], node.pages[:count], next(self._serials))
        upper.pins, upper.used_at, upper.salt = node.pins, node.used_at, node.salt
        upper.hashes, node.hashes = node.hashes[:count], node.hashes[count:]
        node.parent.children[self._own_key(upper)] = upper
        node.parent, node.token_ids, node.pages = upper, node.token_ids[border:], node.pages[count:]
        node.salt = b""
        upper.children[self._own_key(node)] = node
        self._num_nodes += 1
        return upper

    def _add_leaf(
        self, parent: RadixNode, key: bytes, token_ids: Int32Array, pages: Int32Array, salt: bytes
    ) -> RadixNode:
        leaf = RadixNode(parent, token_ids.copy(), pages.copy(), next(self._serials))
        parent.children[key] = leaf
        if parent is self._root:
            leaf.salt = salt
        if self._records:
            before = parent.hashes[-1] if parent is not self._root else None
            leaf.hashes = page_hashes(before, leaf.token_ids, self._page_size, leaf.salt)
            self._changes.append(PagesStored(list(leaf.hashes), before, leaf.token_ids, leaf.salt))
        self._num_nodes += 1
        self._num_pages += len(pages)
        return leaf

    def _remove_leaf(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[self._own_key(node)]
        node.parent = None
        self._num_nodes -= 1
        if parent is not self._root and not parent.children and not parent.pins:
            self._push_leaf(parent)

    def _pin(self, node: RadixNode, end: RadixNode) -> None:
        """One more pin on every node from `node` up to, not including, its ancestor `end`."""
        while node is not end:
            if node.pins == 0:
                self._num_pinned += len(node.pages)
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
