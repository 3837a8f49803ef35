"""The parts that parsers split an answer's text into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Protocol

STOP, STOP_TEXT = "stop", "stop text"  # why an answer ended: by itself, or at a text that the request named


class Part(NamedTuple):
    """`reasoning`, `content`: more text; `call`: call `number` begins, `text` is its name; `arguments`: more of
    them; `broken`: call `number` and those behind it are none after all, and `text` is all that was written since its
    beginning."""

    kind: Literal["reasoning", "content", "call", "arguments", "broken"]
    text: str
    number: int = 0
    id: str = ""  # a call's id, if the model writes one


class ToolParser(Protocol):
    """The calls of one choice of one answer. The parts do not depend on how the text is split into pieces.

    Calls are only those of the request's functions. What stands inside a begun call is never another one: where a call
    is damaged, the rest of the answer is content.
    """

    @property
    def is_damaged(self) -> bool:
        """A call that has begun was damaged or cut off, so that it and all that follows is no call."""
        ...

    def feed(self, text: str) -> list[Part]: ...

    def finish(self, reason: str) -> list[Part]:
        """The remaining parts. `reason`: why the answer ended: STOP, STOP_TEXT, or another word if it was cut off."""
        ...


class ReasoningParser(ToolParser, Protocol):
    """The reasoning of one choice of one answer; its other parts are input for the parser of calls, or calls."""

    has_reasoning: bool  # the answer begins with reasoning

    @property
    def thinking(self) -> bool:
        """The latest text belongs to the reasoning."""
        ...


class HoldingParser(ABC):
    """Holds the end of the text until what follows decides what it is. A subclass takes from `_held` what is certain.

    Pieces of white space that decide nothing are joined once something follows: models write endless runs of it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._spaces: list[str] = []  # behind `_held`

    def feed(self, text: str) -> list[Part]:
        if text.isspace() and not self._held.strip() and self._ignores_space():
            self._spaces.append(text)
            return []
        parts: list[Part] = []
        if self._spaces:
            self._join()
        self._held += text
        self._advance(parts)
        return parts

    def finish(self, reason: str) -> list[Part]:
        """What was held back. `reason`: as that of ToolParser."""
        parts: list[Part] = []
        self._join()
        self._end(parts, reason)
        self._held = ""
        return parts

    def _join(self) -> None:
        self._held = "".join((self._held, *self._spaces))
        self._spaces.clear()

    @abstractmethod
    def _advance(self, parts: list[Part]) -> None:
        """Takes what is certain."""

    @abstractmethod
    def _end(self, parts: list[Part], reason: str) -> None:
        """Takes all: the answer has ended."""

    @abstractmethod
    def _ignores_space(self) -> bool:
        """Whether white space alone decides nothing now."""


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
