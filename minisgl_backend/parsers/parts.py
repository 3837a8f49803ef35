"""What parsers make of an answer's text."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

_FUNCTION_NAME = re.compile(r"[\w.\-/:]{1,128}")


class Part(NamedTuple):
    """`reasoning`, `content`: more text; `call`: call `number` begins, `text` is its name; `arguments`: more of it."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0
    id: str = ""  # of a call, where the model writes one


class ToolParser(Protocol):
    """The calls of one choice of one answer. The parts add up to the same whatever places the text is cut at."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, reason: str) -> list[Part]:
        """What is left to tell. `reason`: why the answer ended, `stop` or `length`."""
        ...


class ThoughtParser(ToolParser, Protocol):
    """The thoughts of one choice of one answer; what else it tells is for the parser of calls, or told as calls."""

    has_thought: bool  # the answer has begun with thoughts

    @property
    def thinking(self) -> bool:
        """What came last belongs to the thoughts."""
        ...


def content(text: str) -> list[Part]:
    """The part that the text is, none where it is empty."""
    return [Part("content", text)] if text else []


def partial_suffix(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def without_surrogates(text: str) -> str:
    """Half characters that a model wrote as escapes stay escapes: they have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def may_be_function(name: str, offered: Collection[str] | None) -> bool:
    """Whether a call may have that name: one of those offered, or at least what can be a function's name."""
    return name in (offered or ()) or _FUNCTION_NAME.fullmatch(name) is not None
