"""The prefix cache's ids of placeholder tokens, which stand for other content such as an image.

A vocabulary token's id is its own. A placeholder gets an id beyond any vocabulary, made of the content's digest and
its position in the content, so that equal placeholders share a page only where their contents are equal, too. The first
two of a span have 61 bits of the digest each, so that two contents with equal ids are out of reach even of one who
chooses both: a path of the tree that reaches further has passed both. SGLang pads prompts with such ids (pad_value);
vLLM adds the digests to the block hashes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import IdArray, Int32Array
from minisgl_backend.request import Content

FIRST = 1 << 62  # ids from here on stand for content; int64
_LARGEST_TOKEN = 2**31 - 1
_KIND = b"minisgl content"  # tells these hashes from those of other things


def content_ids(token_ids: Int32Array, contents: Sequence[Content]) -> IdArray:
    """The ids of a prompt's first tokens, int64 [num_tokens]; without contents `token_ids` itself."""
    if not contents:
        return token_ids
    ids = token_ids.astype(np.int64)
    for content in contents:
        part = ids[content.start : content.start + content.length]
        digest = hashlib.blake2b(content.digest, digest_size=16, person=_KIND).digest()
        first, second = (FIRST | value >> 3 for value in struct.unpack("<QQ", digest))
        part[:] = first + np.arange(len(part))
        part[1:2] = second
    return ids


def id_bytes(ids: IdArray) -> bytes:
    """The ids of a page as bytes for keys and hashes: 4 per token, or 8 if one stands for content; same in every
    engine."""
    is_wide = ids.dtype != np.int32 and bool((ids > _LARGEST_TOKEN).any())
    return ids.astype("<i8" if is_wide else "<i4", copy=False).tobytes()
