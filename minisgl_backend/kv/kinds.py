"""What a layer keeps of a row's tokens: all of them, those of a window that slides, or those of a chunk.

A kind counts in pages of `page_size` tokens. A *border* is a number of pages: those before a row's next token, or those
of a prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Int32Array


class CacheKind(ABC):
    """Layers of one kind need the same tokens of a row. There is none for states, which do not consist of pages."""

    keeps_all = False  # whether a row keeps its pages until it ends

    @abstractmethod
    def most_kept(self, page_size: int) -> int | None:
        """Pages before a border that a decoding row may still have to keep; None: all."""

    @abstractmethod
    def first_kept(self, borders: Int32Array, page_size: int) -> Int32Array:
        """Of which page on a row keeps pages, for the token before the border, too, which may be in flight.

        borders: [n] -> [n], below 0 where that is all."""

    @abstractmethod
    def first_needed(self, borders: Int32Array, page_size: int) -> Int32Array:
        """Likewise of which page on a prefix is needed that ends at the border, by the token behind it."""

    def pages_of_row(self, num_tokens: int, page_size: int) -> int:
        """Pages that a decoding row of `num_tokens` holds, at most."""
        count, kept = -(-num_tokens // page_size), self.most_kept(page_size)
        return count if kept is None else min(kept + 1, count)


@dataclass(frozen=True, slots=True)
class Full(CacheKind):
    """A token sees all tokens before it."""

    keeps_all = True

    def most_kept(self, page_size: int) -> None:
        return None

    def first_kept(self, borders: Int32Array, page_size: int) -> Int32Array:
        return np.zeros_like(borders)

    first_needed = first_kept


@dataclass(frozen=True, slots=True)
class Sliding(CacheKind):
    """A token sees that many last tokens, itself included."""

    window: int

    def most_kept(self, page_size: int) -> int:
        return -(-self.window // page_size)

    def first_kept(self, borders: Int32Array, page_size: int) -> Int32Array:
        return borders - np.int32(-(-self.window // page_size))

    def first_needed(self, borders: Int32Array, page_size: int) -> Int32Array:
        return borders - np.int32(-(-(self.window - 1) // page_size))


@dataclass(frozen=True, slots=True)
class Chunked(CacheKind):
    """A token sees those of its own chunk, up to itself. Chunks begin at multiples of their size."""

    size: int  # tokens

    def most_kept(self, page_size: int) -> int:
        return -(-self.size // page_size)

    def first_kept(self, borders: Int32Array, page_size: int) -> Int32Array:
        return self._first_page(borders * np.int32(page_size) - np.int32(1), page_size)

    def first_needed(self, borders: Int32Array, page_size: int) -> Int32Array:
        return self._first_page(borders * np.int32(page_size), page_size)

    def _first_page(self, positions: Int32Array, page_size: int) -> Int32Array:
        first: Int32Array = positions // np.int32(self.size) * np.int32(self.size) // np.int32(page_size)
        return first


FULL = Full()
_ORDER = (Full, Sliding, Chunked)


def order(kind: CacheKind) -> tuple[int, int]:
    """Sorts kinds: those that keep everything come first, chunks last, smaller ones before larger ones."""
    size = kind.window if isinstance(kind, Sliding) else kind.size if isinstance(kind, Chunked) else 0
    return _ORDER.index(type(kind)), size


def kind_of(window: int | None, chunk: int | None, max_seq_len: int) -> CacheKind:
    """The kind of a layer with this window, or chunks of this size (None: without). What no row outgrows is none: such
    layers join those that see everything."""
    if window is not None and window < max_seq_len:
        return Sliding(window)
    if chunk is not None and chunk < max_seq_len:
        return Chunked(chunk)
    return FULL
