"""The interface of prefix caches, and the one that keeps nothing."""

from __future__ import annotations

import abc
from typing import Generic, TypeVar

import msgspec
import numpy as np

from minisgl_backend.arrays import NO_INT32, IdArray, Int32Array
from minisgl_backend.cache.changes import CacheChange

Pin = TypeVar("Pin")


class PrefixMatch(msgspec.Struct, Generic[Pin], frozen=True):
    """Pages that hold the first `num_pages * page_size` tokens of a prompt. They are pinned until `unpin(pin)` and, in
    groups with windows, `unref(pages)`."""

    pages: (
        Int32Array  # [num_groups, num_pages]; 0: the group does not have that page, and its next token does not see it
    )
    pin: Pin
    salt: bytes = b""  # the prompt's salt
    # Of a model with states: the slot of the state behind these pages, pinned, too (0: there are none), and how many
    # pages the cache has of the prompt, which may be more than those with a state behind them.
    state: int = 0
    known_pages: int = 0

    @property
    def num_pages(self) -> int:
        """Number of pages in each group."""
        return self.pages.shape[1]


class PrefixCache(abc.ABC, Generic[Pin]):
    """Maps token prefixes to pages that outlive their sequence. All counts are whole pages.

    Pages are ordered by cache group, groups without a window first (`kv.groups`). For these, a pin protects the pages
    from the root to one node of the cache. Pages of groups with windows are pinned one by one, since their users
    release them one by one; they may be missing anywhere in a prefix. A cached page is either pinned (in use by a
    sequence) or evictable.
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

    # Token ids are int32 [num_tokens], or int64 where some stand for other content (`content_ids`).
    @abc.abstractmethod
    def peek(self, token_ids: IdArray, salt: bytes = b"") -> int:
        """Pages of each group that `match` would find; changes nothing, not even the eviction order."""

    @abc.abstractmethod
    def match(self, token_ids: IdArray, salt: bytes = b"") -> PrefixMatch[Pin]:
        """The longest prefix of `token_ids` in whole pages that was added with this salt, pinned. In every group it has
        all pages that the token after it can see."""

    @abc.abstractmethod
    def unpin(self, pin: Pin) -> None:
        """Ends a pin. Once for each pin."""

    @abc.abstractmethod
    def unref(self, pages: Int32Array) -> None:
        """Releases pages of groups with windows (int32 [num_pages]) that came from `match` or `extend`; a page is
        listed once for each user that releases it."""

    @abc.abstractmethod
    def extend(self, pin: Pin, token_ids: IdArray, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[Pin]:
        """Adds the pages that follow the pinned prefix, and moves the pin to their end.

        Args:
            pin: consumed; the returned pin replaces it.
            token_ids: [num_pages * page_size], the tokens after the pinned prefix.
            pages: int32 [num_groups, num_pages], the pages with these tokens' keys and values; 0 where a group with a
            window has given its page back.
            salt: of the prompt that the pages begin or continue; prompts of different salts share no page.

        Returns:
            the pages that the cache now holds for these tokens, pinned, and 0 where `pages` is 0; may be the array
            `pages` itself. Where they differ from `pages`, the cache had the tokens already, and the caller keeps its
            own page. Fewer than `pages` if the cache does not keep the rest.
        """

    @abc.abstractmethod
    def evict(self, count: int) -> Int32Array:
        """Removes up to `count` evictable pages, least recently used first, and returns their ids."""

    def keep_state(self, pin: Pin, behind: int, slot: int, hits: int) -> bool:
        """Adds the state of a model with states that is in `slot`. Returns whether the cache keeps it: not where it has
        one there already, which counts as used as often if that is `PROVED`.

        Args:
            pin: of the prefix to which the state belongs.
            behind: columns of the prefix that follow the state.
            hits: how often it counts as used from the start (`state_slots`).
        """
        return False

    def drop_state(self, slot: int) -> None:
        """Removes the state in this slot from the cache."""
        raise AssertionError("no state is in this cache")

    def evict_state(self, *, proved: bool) -> bool:
        """Removes a state that nobody uses, and so frees its slot; False: there is none. `proved`: also one that
        prompts have used."""
        return False

    def take_changes(self) -> list[CacheChange]:
        """What was stored and removed since the last call, in order; empty unless changes are recorded."""
        return []

    @abc.abstractmethod
    def check(self, pins: list[Pin], in_use: Int32Array = NO_INT32) -> None:
        """Raises AssertionError unless every invariant holds. `pins` are all current pins, `in_use` the pages of groups
        with windows in use, once for each user."""

    @abc.abstractmethod
    def pages(self) -> Int32Array:
        """The ids of all pages that the cache owns; for checks."""


class NaiveCache(PrefixCache[None]):
    """Keeps nothing: the baseline for other caches."""

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

    def unref(self, pages: Int32Array) -> None:
        pass

    def extend(self, pin: None, token_ids: IdArray, pages: Int32Array, salt: bytes = b"") -> PrefixMatch[None]:
        return PrefixMatch(self._none, None, salt)

    def evict(self, count: int) -> Int32Array:
        return NO_INT32

    def check(self, pins: list[None], in_use: Int32Array = NO_INT32) -> None:
        pass

    def pages(self) -> Int32Array:
        return NO_INT32
