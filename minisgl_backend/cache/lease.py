"""A row's right to its pages, and how changes of its pages are told."""

from __future__ import annotations

from typing import Any, NamedTuple

from minisgl_backend.arrays import Int32Array


class PageLease:
    """The first `num_shared` columns of the row belong to the prefix cache, and their pages are pinned there, except
    those out of a window that have been given back; all others are this row's alone."""

    __slots__ = ("num_shared", "pin", "released", "row", "salt")

    def __init__(self, row: int, pin: Any, num_shared: int, salt: bytes) -> None:
        self.row = row
        self.pin = pin  # its pin in the prefix cache
        self.salt = salt  # the salt to publish under
        self.num_shared = num_shared
        self.released = False

    def refuse_released(self) -> None:
        """Raises RuntimeError for one that has ended."""
        if self.released:
            raise RuntimeError(f"the lease of row {self.row} has ended already")

    def share(self, pin: Any, num_shared: int) -> None:
        """More of its columns belong to the prefix cache now."""
        self.pin, self.num_shared = pin, num_shared

    def end(self) -> None:
        self.released = True


class TableEntries(NamedTuple):
    """New values of page-table entries of one or more rows; page 0: the row no longer needs a page there."""

    groups: Int32Array  # [num_entries]  which of the column's pages (`kv.groups`)
    rows: Int32Array  # [num_entries]
    columns: Int32Array  # [num_entries]
    pages: Int32Array  # [num_entries]


class Swap(NamedTuple):
    """Pages of a row that were exchanged for equal ones of the prefix cache. The caller passes `old` to `free` once no
    step that was planned before still reads them."""

    entries: TableEntries
    old: Int32Array  # [num_swapped]
