"""An image is its digest: equal ones have equal pixels, grids, tokens and vectors."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_DOMAIN = b"minisgl image 1"


def image_digest(data: bytes, **effective: Any) -> bytes:
    """32 bytes of a file, and of all that changes what is made of it: `effective`, as JSON's values."""
    options = json.dumps(effective, sort_keys=True, separators=(",", ":")).encode()
    found = hashlib.sha256()
    for part in (_DOMAIN, options, data):  # each behind its length: no two lists of parts have equal bytes
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
