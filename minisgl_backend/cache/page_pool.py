"""The free list of KV pages."""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import Int32Array


class PagePool:
    """A free list of the page ids 1 to `num_pages`; page 0 belongs to the runner's padding row.

    Last in, first out: a page that was just freed is the likeliest to be in a device cache, and the order is the same
    in every run.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)  # the top is the end: page 1 is handed out first
        self._is_free = np.ones(num_pages + 1, dtype=np.bool_)  # page 0, too: giving it back is an error
        self._count = num_pages

    @property
    def num_free(self) -> int:
        return self._count

    def take(self, count: int) -> Int32Array:
        """`count` page ids, int32 [count]. The caller has checked that `count <= num_free`."""
        assert count <= self._count, "pages are taken only after num_free was checked"
        self._count -= count
        pages = self._stack[self._count : self._count + count][::-1].copy()
        self._is_free[pages] = False
        return pages

    def give_back(self, pages: Int32Array) -> None:
        """The opposite of `take`. Raises RuntimeError when one of the pages is already free."""
        if not len(pages):
            return
        if self._is_free[pages].any():
            raise RuntimeError(f"pages {pages.tolist()} cannot be given back: one is free already or never was taken")
        self._is_free[pages] = True
        self._stack[self._count : self._count + len(pages)] = pages[::-1]
        self._count += len(pages)

    def check(self) -> None:
        """Raises AssertionError when the list and its flags disagree."""
        listed = self._stack[: self._count]
        assert len(np.unique(listed)) == self._count, "a page is on the free list twice"
        assert self._is_free[listed].all(), "a page of the free list is flagged as taken"
        assert int(self._is_free[1:].sum()) == self._count, "a page is flagged as free and not on the list"

    def free_pages(self) -> Int32Array:
        """The ids of all free pages, int32 [num_free], in no particular order; for checks."""
        return self._stack[: self._count].copy()
