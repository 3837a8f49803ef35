"""JSON as the endpoint writes it, and responses of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode
# The ends of lines that JSON takes as they are: others are control characters, which it escapes.
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def encode(value: Any) -> bytes:
    """JSON in one line, also for readers that end lines where Unicode does, as Python's `str.splitlines` does."""
    data = _encode(value)
    if not data.isascii():
        for end, escaped in _LINE_ENDS.items():
            data = data.replace(end, escaped)
    return data


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")
