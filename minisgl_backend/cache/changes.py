"""Changes of a prefix cache for subscribers: pages that it has stored and removed, identified by hashes.

A page's hash covers its tokens, all tokens before them and the salt of their prompt, and nothing else. So equal
prefixes have equal hashes in every engine with pages of the same size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from minisgl_backend.arrays import IdArray
from minisgl_backend.cache.content_ids import id_bytes

HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Consecutive pages have been added to the cache."""

    hashes: list[int]  # [num_pages]
    parent: int | None  # hash of the page before the first one; None: they begin a prompt
    token_ids: IdArray  # [num_pages * page_size]
    salt: bytes = b""  # the prompt's salt, if the first page begins a prompt


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages have been removed from the cache."""

    hashes: list[int]


CacheChange = PagesStored | PagesRemoved


def page_hashes(parent: int | None, token_ids: IdArray, page_size: int, salt: bytes = b"") -> list[int]:
    """Unsigned 64-bit hashes of the whole pages of `token_ids`, which follow the page with hash `parent`, or (None)
    begin a prompt with this salt."""
    before = salt if parent is None else parent.to_bytes(HASH_BYTES, "big")
    hashes = []
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = id_bytes(token_ids[start : start + page_size])
        before = hashlib.blake2b(before + page, digest_size=HASH_BYTES).digest()
        hashes.append(int.from_bytes(before, "big"))
    return hashes
