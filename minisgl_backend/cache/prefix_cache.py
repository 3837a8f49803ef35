"""What a prefix cache does, and the one that does nothing."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Generic, TypeVar

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.cache.changes import CacheChange

Pin = TypeVar("Pin")


@dataclass(frozen=True, slots=True)
class PrefixMatch(Generic[Pin]):
    """Pages that hold the first `len(pages) * page_size` tokens of a prompt, pinned until `unpin(pin)`."""

    pages: Int32Array  # [num_matched_pages]
    pin: Pin
    salt: bytes = b""  # of the prompt


class PrefixCache(abc.ABC, Generic[Pin]):
    """Maps token prefixes to pages that outlive their sequence. Everything counts in whole pages.

    A pin protects the pages from the root to one node of the cache. A page of the cache is either pinned (some
    sequence uses it) or evictable.
    """

    keeps_prefixes = True

    @property
    @abc.abstractmethod
    def num_pages(self) -> int:
        """Pages that the cache owns, pinned or not."""

    @property
    @abc.abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could hand out now."""

    @abc.abstractmethod
    def peek(self, token_ids: Int32Array, salt: bytes = b"") -> int:
        """Pages that `match` would find; changes nothing, not even the eviction order."""

    @abc.abstractmethod
    def match(self, token_ids: Int32Array, salt: bytes = b"") -> PrefixMatch[Pin]:
        """The longest cached prefix of `token_ids` (int32 [num_tokens]) in whole pages, pinned, of those that were
        added with this salt."""

    @abc.abstractmethod
    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Once for each pin."""

    @abc.abstractmethod
    def extend(self, pin: Pin, token_ids: Int32Array, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[Pin]:
        """Adds what follows the pinned prefix, and moves the pin to its end.

        Args:
            pin: consumed; the returned pin replaces it.
            token_ids: int32 [len(pages) * page_size], the tokens after the pinned prefix.
            pages: int32 [num_pages], where their keys and values are.
            salt: of the prompt that they begin or continue; prompts of different salts share no page.

        Returns:
            the pages that the cache now holds for these tokens. Where they differ from `pages` the cache had the
            tokens already, and the page handed in stays with the caller. Fewer than `pages` when the cache does not
            keep the rest.
        """

    @abc.abstractmethod
    def evict(self, count: int) -> Int32Array:
        """Forgets up to `count` evictable pages, least recently used first, and hands out their ids."""

    def take_changes(self) -> list[CacheChange]:
        """What was stored and removed since the last call, in order; nothing where that is not recorded."""
        return []

    @abc.abstractmethod
    def check(self, pins: list[Pin]) -> None:
        """Raises AssertionError unless every law of the structure holds; `pins` are all pins that are out."""

    @abc.abstractmethod
    def pages(self) -> Int32Array:
        """The ids of all pages that the cache owns; for checks."""


class NaiveCache(PrefixCache[None]):
    """Keeps nothing: the baseline that others are measured against."""

    keeps_prefixes = False
    num_pages = 0
    num_evictable = 0

    def peek(self, token_ids: Int32Array, salt: bytes = b"") -> int:
        return 0

    def match(self, token_ids: Int32Array, salt: bytes = b"") -> PrefixMatch[None]:
        return PrefixMatch(NO_INT32, None, salt)

    def unpin(self, pin: None) -> None:
        pass

    def extend(self, pin: None, token_ids: Int32Array, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[None]:
        return PrefixMatch(NO_INT32, None)

    def evict(self, count: int) -> Int32Array:
        return NO_INT32

    def check(self, pins: list[None]) -> None:
        pass

    def pages(self) -> Int32Array:
        return NO_INT32
