"""Thoughts before an answer: `<think>...</think>` (Qwen3, DeepSeek-R1) -> reasoning and content.

Incremental: the parts add up to the same whatever places the text was cut at.
"""

from __future__ import annotations

from typing import Literal

from minisgl_backend.parsers.parts import Part

OPEN, CLOSE = "<think>", "</think>"


def partial_suffix(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


class ReasoningParser:
    """One choice of one answer. White space around the thoughts is dropped."""

    def __init__(self, *, inside: bool) -> None:
        """`inside`: the answer begins among thoughts (the prompt has opened them), with `<think>` or without it."""
        self._inside = inside
        self._state: Literal["start", "reasoning", "content"] = "start"
        self._held = ""
        self._at_begin = False  # white space at the start of a part is dropped
        self.has_thought = False  # the answer began with thoughts

    @property
    def thinking(self) -> bool:
        """What came last belongs to the thoughts."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        if self._state == "start" and not self._begin():
            return parts
        if self._state == "reasoning":
            self._reason(parts)
        if self._state == "content":
            self._take("content", self._held, parts)
            self._held = ""
        return parts

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        parts: list[Part] = []
        if self._state == "start":
            self._state = "reasoning" if self._inside else "content"
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        text = self._held.rstrip() if kind == "reasoning" else self._held
        self._take(kind, text, parts)
        self._held = ""
        return parts

    def _begin(self) -> bool:
        """Decides what the answer begins with; False while that is open."""
        stripped = self._held.lstrip()
        if stripped.startswith(OPEN):
            self._held = stripped[len(OPEN) :]
            self._state, self._at_begin = "reasoning", True
            self.has_thought = True
            return True
        if OPEN.startswith(stripped):
            return False
        self._state = "reasoning" if self._inside else "content"
        self._at_begin = self.has_thought = self._inside
        return True

    def _reason(self, parts: list[Part]) -> None:
        end = self._held.find(CLOSE)
        if end >= 0:
            self._take("reasoning", self._held[:end].rstrip(), parts)
            self._held = self._held[end + len(CLOSE) :]
            self._state, self._at_begin = "content", True
            return
        keep = partial_suffix(self._held, CLOSE)
        safe = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(safe) :]
        self._take("reasoning", safe, parts)

    def _take(self, kind: Literal["reasoning", "content"], text: str, parts: list[Part]) -> None:
        if self._at_begin:
            text = text.lstrip()
            self._at_begin = not text
        if text:
            parts.append(Part(kind, text))
