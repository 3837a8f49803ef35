"""Finds stop strings in a growing text, also across the boundaries of its pieces.

The result does not depend on how the text is split: the first stop string to be complete ends the text (of two that end
together, the longer one).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one stream, and the text that may yet become one."""

    __slots__ = ("_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is part of the text. Empty strings are ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, counts: bool = True) -> tuple[str, bool]:
        """The text that can be sent, and whether a stop string was found; nothing may be fed after that.

        `counts`: whether a stop string may end in this piece; it may begin in an earlier one in any case.
        """
        text = self._held + piece
        found = self._first_match(text, len(self._held)) if counts else None
        if found is not None:
            start, end = found
            self.found = text[start:end]
            self._held = ""
            return text[: end if self._include else start], True
        keep = self._partial_match(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text that was held back: the stream ended and it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, known: int) -> tuple[int, int] | None:
        """Start and end of the first match that ends after the first `known` characters."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, known + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
        return best

    def _partial_match(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
