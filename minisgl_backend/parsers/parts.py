"""The parts that parsers split an answer's text into."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple, Protocol

_FUNCTION_NAME = re.compile(r"[\w.\-/:]{1,128}")


class Part(NamedTuple):
    """`reasoning`, `content`: more text; `call`: call `number` begins, `text` is its name; `arguments`: more of
    them."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    number: int = 0
    id: str = ""  # a call's id, if the model writes one


class ToolParser(Protocol):
    """The calls of one choice of one answer. The parts do not depend on how the text is split into pieces."""

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, reason: str) -> list[Part]:
        """The remaining parts. `reason`: why the answer ended, `stop` or `length`."""
        ...


class ThoughtParser(ToolParser, Protocol):
    """The reasoning of one choice of one answer; its other parts are input for the parser of calls, or calls."""

    has_thought: bool  # the answer begins with reasoning

    @property
    def thinking(self) -> bool:
        """The latest text belongs to the reasoning."""
        ...


def content(text: str) -> list[Part]:
    """The text as a part; none if it is empty."""
    return [Part("content", text)] if text else []


def partial_suffix(text: str, tag: str) -> int:
    """Number of characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def without_surrogates(text: str) -> str:
    """Leaves lone surrogates, which a model wrote as escapes, as escapes: they have no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def may_be_function(name: str, offered: Collection[str] | None) -> bool:
    """Whether a call may have that name: one of those offered, or at least a valid function name."""
    return name in (offered or ()) or _FUNCTION_NAME.fullmatch(name) is not None
