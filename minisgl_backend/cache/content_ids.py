"""Ids by which the prefix cache knows tokens that stand for something else, as an image's do.

A token of the vocabulary is known by its own id. One that stands for a part of some content has a number beyond any
vocabulary, made of the content's digest and the place in it, so that equal tokens share a page only where what they
stand for is equal, too. SGLang pads prompts with such numbers, vLLM puts digests into the keys of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import IdArray, Int32Array
from minisgl_backend.request import Content

FIRST = 1 << 62  # ids from here on are of contents; int64
_LARGEST_TOKEN = 2**31 - 1


def content_ids(token_ids: Int32Array, contents: Sequence[Content]) -> IdArray:
    """Of the first tokens of a prompt, int64 [num_tokens]; where it has no contents, these themselves."""
    if not contents:
        return token_ids
    ids = token_ids.astype(np.int64)
    for content in contents:
        part = ids[content.start : content.start + content.length]
        digest = hashlib.blake2b(content.digest, digest_size=8).digest()
        part[:] = (FIRST | int.from_bytes(digest, "little") >> 3) + np.arange(len(part))
    return ids


def id_bytes(ids: IdArray) -> bytes:
    """Of a page, for keys and hashes: 4 a token, or 8 where some are of contents; the same in every engine."""
    is_wide = ids.dtype != np.int32 and bool((ids > _LARGEST_TOKEN).any())
    return ids.astype("<i8" if is_wide else "<i4", copy=False).tobytes()
