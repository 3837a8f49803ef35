"""What passes between a front and its workers: JSON, bounded, of plain values. No pickles, no pixels."""

from __future__ import annotations

import msgspec

from minisgl_backend.images.sizes import View

MAX_ANSWER_BYTES = 4096


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a header; the file's bytes follow as a message of their own. The image stays open for `Decode`."""

    raw: tuple[int, int] | None = None  # width and height of bytes that are RGB pixels already
    turn: int = 1  # of these


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the open image's pixels."""

    path: str
    views: tuple[View, ...]
    shape: tuple[int, int, int, int]
    resample: int
    background: tuple[int, int, int]


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of either task; the size is that of `Open`."""

    width: int = 0
    height: int = 0
    refused: str = ""  # words about the image
    full: bool = False  # shared memory has no room
