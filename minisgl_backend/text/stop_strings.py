"""Finds stop strings in a growing text, across every border between its pieces.

The result does not depend on how the text is cut: the stop string that is complete first ends the text (of two that end
together, the longer one).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one stream and the text that may yet become one of them."""

    __slots__ = ("_held", "_include", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include`: the stop string itself is part of the text. Empty strings mean nothing."""
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, counts: bool = True) -> tuple[str, bool]:
        """The text that is free to go, and whether a stop string was found; nothing more may be fed after that.

        `counts`: whether a stop string may end in this piece. It may begin in an earlier one all the same.
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
        """Start and end of the first match that ends behind the `known` first characters."""
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
        """Length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
