"""The files of a batch, line by line: what is asked, and what has been answered before a crash."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from minisgl_backend.openai.requests.batches import MAX_LINES, Line, parse_line

_MAX_ERRORS = 100  # errors of a file that are reported


def _numbered(file: IO[bytes], max_bytes: int) -> Generator[tuple[int, bytes | None], None, None]:
    """(number, line) of non-empty lines; None for a line longer than `max_bytes`."""
    number = 0
    while text := file.readline(max_bytes + 1):
        number += 1
        if number == 1:
            text = text.removeprefix(codecs.BOM_UTF8)  # as some editors write it
        is_long = len(text) > max_bytes and not text.endswith(b"\n")
        while is_long and text and not text.endswith(b"\n"):
            text = file.readline(max_bytes + 1)
        if is_long or text.strip():
            yield number, None if is_long else text


def _parsed(text: bytes | None, endpoint: str, max_bytes: int) -> Line:
    """Raises ValueError with what is wrong."""
    if text is None:
        raise ValueError(f"it is longer than {max_bytes} bytes, all that a request may have (--max-body-bytes)")
    return parse_line(text, endpoint)


def validate_lines(path: Path, endpoint: str, max_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """(number of lines, errors of some of them)."""
    seen: set[str] = set()
    errors: list[dict[str, Any]] = []
    try:
        with path.open("rb") as file:
            for number, text in _numbered(file, max_bytes):
                try:
                    line = _parsed(text, endpoint, max_bytes)
                    if line.custom_id in seen:
                        raise ValueError(f"custom_id is {line.custom_id[:60]!r}, as that of another line")
                    seen.add(line.custom_id)
                    if len(seen) > MAX_LINES:
                        raise ValueError(f"there are more than {MAX_LINES} lines, all that a batch may have")
                except ValueError as error:
                    message = f"line {number}: {error}"
                    errors.append({"code": "invalid_line", "message": message, "line": number, "param": None})
                    if len(errors) >= _MAX_ERRORS or len(seen) > MAX_LINES:
                        break
    except FileNotFoundError:
        errors.append({"code": "no_file", "message": "the input file was deleted", "line": None, "param": None})
    if not seen and not errors:
        errors.append({"code": "empty_file", "message": "the input file has no lines", "line": None, "param": None})
    return len(seen), errors


def custom_ids_in(path: Path) -> set[str]:
    """Ids in an existing file. A last line that was cut off by a crash is removed."""
    found: set[str] = set()
    if not path.exists():
        return found
    whole = 0
    with path.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            found.add(json.loads(text)["custom_id"])
            whole += len(text)
    os.truncate(path, whole)
    return found


def lines_left(path: Path, endpoint: str, done: set[str], max_bytes: int) -> Generator[Line, None, None]:
    """The lines still to be computed."""
    with path.open("rb") as file:
        for _, text in _numbered(file, max_bytes):
            if (line := _parsed(text, endpoint, max_bytes)).custom_id not in done:
                yield line
