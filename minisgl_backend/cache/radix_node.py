"""The nodes of the radix tree."""

from __future__ import annotations

from minisgl_backend.arrays import NO_INT32, IdArray, Int32Array


class RadixNode:
    """One edge of the tree with the node at its lower end. Only the prefix cache uses it."""

    __slots__ = ("children", "hashes", "key", "pages", "parent", "pins", "serial", "states", "token_ids", "used_at")

    def __init__(
        self,
        parent: RadixNode | None,
        key: bytes,
        token_ids: IdArray,
        pages: Int32Array,
        serial: int,
        hashes: list[int] | None = None,
        states: Int32Array = NO_INT32,
    ) -> None:
        self.parent = parent  # None: the root, or a node removed from the tree
        self.key = key  # its key in the parent's children
        self.token_ids = token_ids  # [num_columns * page_size]
        self.pages = pages  # [pages of a column, num_columns]; 0: a hole
        self.states = (
            states  # [num_columns]  slot of the state behind each column, 0: none; [0]: a model without states
        )
        self.hashes = hashes or []  # [num_columns], if changes are recorded
        self.children: dict[bytes, RadixNode] = {}  # by the salt and the tokens of the child's first column
        self.pins = 0  # pins on this node or below it
        self.used_at = 0  # tick of the last match or unpin on a path through this node
        self.serial = serial  # breaks ties, so that the eviction order is the same in every run

    @property
    def num_columns(self) -> int:
        return self.pages.shape[1]  # holes included

    @property
    def is_idle_leaf(self) -> bool:
        """Whether it can be removed."""
        return self.parent is not None and not self.pins and not self.children

    @property
    def num_reached(self) -> int:
        """Columns up to the deepest state: no match ends behind it, unless at a later node."""
        found = self.states.nonzero()[0]
        return int(found[-1]) + 1 if len(found) else 0

    def column_before(self, behind: int) -> tuple[RadixNode, int]:
        """The column of the path through this node, and its node, that so many other columns follow up to the node's
        end."""
        node = self
        while behind >= node.num_columns:
            behind -= node.num_columns
            assert node.parent is not None, "the column is on the path"
            node = node.parent
        return node, node.num_columns - 1 - behind

    def keep_state(self, column: int, slot: int) -> None:
        self.states[column] = slot

    def drop_state(self, slot: int) -> None:
        self.states[self.states == slot] = 0

    def use(self, tick: int) -> None:
        self.used_at = tick

    def pin(self) -> bool:
        """Adds a pin; returns whether it is the only one."""
        self.pins += 1
        return self.pins == 1

    def unpin(self, tick: int) -> bool:
        """Ends a pin; returns whether it was the last one."""
        assert self.pins > 0, "a pin ends once"
        self.pins -= 1
        self.used_at = tick
        return not self.pins

    def add(self, child: RadixNode) -> None:
        self.children[child.key] = child

    def remove(self) -> RadixNode:
        """Takes the node out of the tree; returns its parent."""
        parent = self.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[self.key]
        self.parent = None
        return parent

    def cut(self, count: int, page_size: int) -> None:
        """Keeps the first `count` columns of the edge."""
        self.token_ids, self.pages = self.token_ids[: count * page_size], self.pages[:, :count]
        self.states = self.states[:count]
        del self.hashes[count:]

    def split(self, count: int, page_size: int, key: bytes, serial: int) -> RadixNode:
        """Moves the first `count` columns of the edge to a new node above it, which is returned; `key`: of the rest.

        The node itself keeps the lower part, since pins point to it and must still protect the whole path.
        """
        assert self.parent is not None, "the root has no edge to split"
        border = count * page_size
        upper = RadixNode(self.parent, self.key, self.token_ids[:border], self.pages[:, :count], serial)
        upper.states, self.states = self.states[:count], self.states[count:]
        upper.pins, upper.used_at = self.pins, self.used_at
        upper.hashes, self.hashes = self.hashes[:count], self.hashes[count:]
        self.parent.add(upper)
        self.parent, self.key, self.token_ids, self.pages = upper, key, self.token_ids[border:], self.pages[:, count:]
        upper.add(self)
        return upper

    def common_columns(self, token_ids: IdArray, page_size: int) -> int:
        """Number of whole columns that the edge shares with these tokens; the first one is known to be equal."""
        if self.num_columns == 1:
            return 1
        size = min(len(self.token_ids), len(token_ids) // page_size * page_size)
        differs = self.token_ids[:size] != token_ids[:size]
        first = int(differs.argmax())
        return (first if differs[first] else size) // page_size
