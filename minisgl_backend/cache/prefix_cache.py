"""What a prefix cache does, and the one that does nothing."""

from __future__ import annotations

import abc
from typing import Generic, TypeVar

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, IdArray, Int32Array
from minisgl_backend.cache.changes import CacheChange

Pin = TypeVar("Pin")


class PrefixMatch(msgspec.Struct, Generic[Pin], frozen=True):
    """Pages that hold the first `num_pages * page_size` tokens of a prompt, pinned until `unpin(pin)` and, of groups
    with windows, `let_go(pages)`."""

    pages: (
        Int32Array  # [num_groups, num_pages]; 0: the group does not have that page, and its next token does not see it
    )
    pin: Pin
    salt: bytes = b""  # of the prompt

    @property
    def num_pages(self) -> int:
        """Of one group."""
        return self.pages.shape[1]


class PrefixCache(abc.ABC, Generic[Pin]):
    """Maps token prefixes to pages that outlive their sequence. Everything counts in whole pages.

    Pages come by cache group, those of groups without a window first (`kv.groups`). A pin protects the pages of
    these from the root to one node of the cache. Pages of groups with windows are pinned one by one, since their users
    let them go one by one: they may be missing anywhere in a prefix. A page of the cache is either pinned (some
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

    # Ids are int32 [num_tokens] of tokens, or int64 where some stand for other contents (`content_ids`).
    @abc.abstractmethod
    def peek(self, token_ids: IdArray, salt: bytes = b"") -> int:
        """Pages of each group that `match` would find; changes nothing, not even the eviction order."""

    @abc.abstractmethod
    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[Pin]:
        """The longest prefix of `token_ids` in whole pages, pinned, of those that were added with
        this salt: that every group still has, as far as the token behind it can see."""

    @abc.abstractmethod
    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Once for each pin."""

    @abc.abstractmethod
    def let_go(self, pages: Int32Array) -> None:
        """Pages of groups with windows (int32 [num_pages]) that came from `match` or `extend` and that one user each
        does not need any more; a page is listed once for each."""

    @abc.abstractmethod
    def extend(self, pin: Pin, token_ids: IdArray, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[Pin]:
        """Adds what follows the pinned prefix, and moves the pin to its end.

        Args:
            pin: consumed; the returned pin replaces it.
            token_ids: [num_pages * page_size], the tokens after the pinned prefix.
            pages: int32 [num_groups, num_pages], where their keys and values are; 0 where a group with a window has
                given its page back.
            salt: of the prompt that they begin or continue; prompts of different salts share no page.

        Returns:
            the pages that the cache now holds for these tokens, pinned, and 0 where `pages` is; it may be the array
            `pages` itself. Where they differ from `pages` the cache had the tokens already, and the page handed in
            stays with the caller. Fewer than `pages` when the cache does not keep the rest.
        """

    @abc.abstractmethod
    def evict(self, count: int) -> Int32Array:
        """Forgets up to `count` evictable pages, least recently used first, and hands out their ids."""

    def take_changes(self) -> list[CacheChange]:
        """What was stored and removed since the last call, in order; nothing where that is not recorded."""
        return []

    @abc.abstractmethod
    def check(self, pins: list[Pin], in_use: Int32Array = NO_INT32) -> None:
        """Raises AssertionError unless every law of the structure holds; `pins` are all pins that are out, `in_use` the
        pages of groups with windows that are, each once for each user."""

    @abc.abstractmethod
    def pages(self) -> Int32Array:
        """The ids of all pages that the cache owns; for checks."""


class NaiveCache(PrefixCache[None]):
    """Keeps nothing: the baseline that others are measured against."""

    keeps_prefixes = False
    num_pages = 0
    num_evictable = 0

    def __init__(self, num_groups: int = 1) -> None:
        self._none = np.zeros((num_groups, 0), dtype=np.int32)

    def peek(self, token_ids: IdArray, salt: bytes = b"") -> int:
        return 0

    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[None]:
        return PrefixMatch(self._none, None, salt)

    def unpin(self, pin: None) -> None:
        pass

    def let_go(self, pages: Int32Array) -> None:
        pass

    def extend(self, pin: None, token_ids: IdArray, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[None]:
        return PrefixMatch(self._none, None, salt)

    def evict(self, count: int) -> Int32Array:
        return NO_INT32

    def check(self, pins: list[None], in_use: Int32Array = NO_INT32) -> None:
        pass

    def pages(self) -> Int32Array:
        return NO_INT32
