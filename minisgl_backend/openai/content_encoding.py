"""Compressed request bodies (RFC 9110, section 8.4.1), decoded as they arrive."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

ENCODINGS = ("gzip", "deflate")
_SAME = {"x-gzip": "gzip"}
_MAX_AT_ONCE = 1 << 20  # bytes: a small body may decode to a large one, and other requests wait for each piece
_MAX_MEMBERS = 1000  # of gzip data; each may be empty
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class DecodeError(Exception):
    """The body is not what its Content-Encoding says."""


def encodings_of(header: str) -> list[str]:
    """The encodings that a Content-Encoding header names, in the order in which they were applied."""
    names = [name.strip().lower() for name in header.split(",")]
    return [_SAME.get(name, name) for name in names if name not in ("", "identity")]


class Decoder:
    """Decodes one body."""

    def __init__(self, encoding: str) -> None:
        """`encoding`: one of ENCODINGS."""
        self._encoding = encoding
        self._decompressor = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
        self._head = b""  # what has come before the format is known
        self._is_begun = False
        self._num_members = 1

    def decode(self, data: bytes) -> Iterator[bytes]:
        """What `data` adds to the body, in pieces of at most 1 MiB. Raises DecodeError."""
        self._is_begun = self._is_begun or bool(data)
        if self._decompressor is None:
            self._head += data
            if len(self._head) < 2:
                return
            # Some clients mean the bare format by `deflate`, without zlib's header.
            is_zlib = self._head[0] & 15 == zlib.DEFLATED and int.from_bytes(self._head[:2], "big") % 31 == 0
            self._decompressor = zlib.decompressobj(_ZLIB if is_zlib else _RAW)
            data = self._head
        piece = b""
        while data or len(piece) == _MAX_AT_ONCE:  # a full piece: more of it may be waiting inside
            if self._decompressor.eof and data:
                if self._encoding != "gzip" or self._num_members == _MAX_MEMBERS:
                    raise DecodeError(f"there is something behind its {self._encoding} data")
                self._decompressor = zlib.decompressobj(_GZIP)  # several members are one body
                self._num_members += 1
            try:
                piece = self._decompressor.decompress(data, _MAX_AT_ONCE)
            except zlib.error:
                raise DecodeError(f"it is no {self._encoding} data") from None
            yield piece
            data = self._decompressor.unconsumed_tail or self._decompressor.unused_data

    def finish(self) -> None:
        """The body has ended, which an empty one may at once. Raises DecodeError if it is incomplete."""
        if self._is_begun and not (self._decompressor is not None and self._decompressor.eof):
            raise DecodeError(f"its {self._encoding} data is incomplete")
