"""What parsers make of an answer's text."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Part(NamedTuple):
    """`reasoning`, `content`: more text; `call`: call `number` begins, `text` is its name; `arguments`: more of it."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0


def without_surrogates(text: str) -> str:
    """Half characters that a model wrote as escapes stay escapes: they have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
