"""Reasoning before an answer, between tags like `<think>...</think>` -> reasoning and content.

Incremental: the parts do not depend on how the text is split into pieces.
"""

from __future__ import annotations

from typing import Literal

from minisgl_backend.parsers.parts import HoldingParser, Part, partial_suffix

OPEN, CLOSE = "<think>", "</think>"


class TagReasoningParser(HoldingParser):
    """One choice of one answer."""

    def __init__(self, *, inside: bool, tags: tuple[str, str] = (OPEN, CLOSE), apart: bool = True) -> None:
        """`inside`: the answer begins within the reasoning (the prompt opens it), with or without the opening tag.
        `apart`: without the tags and the white space around it; otherwise all as it was written."""
        super().__init__()
        self._inside = inside
        self._apart = apart
        self._open, self._close = tags
        self._state: Literal["start", "reasoning", "content"] = "start"
        self._at_begin = False  # white space at the start of a part is dropped
        self.has_reasoning = False  # the answer began with reasoning

    @property
    def is_damaged(self) -> bool:
        return False

    @property
    def thinking(self) -> bool:
        """The latest text belongs to the reasoning."""
        return self._state == "reasoning"

    def _advance(self, parts: list[Part]) -> None:
        if self._state == "start" and not self._begin():
            return
        if self._state == "reasoning":
            self._reason(parts)
        if self._state == "content":
            self._take("content", self._held, parts)
            self._held = ""

    def _ignores_space(self) -> bool:
        return self._state != "content"

    def _end(self, parts: list[Part], reason: str) -> None:
        if self._state == "start":
            self._state = "reasoning" if self._inside else "content"
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        text = self._held.rstrip() if kind == "reasoning" and self._apart else self._held
        self._take(kind, text, parts)

    def _begin(self) -> bool:
        """Decides what the answer begins with; False while that is undecided."""
        stripped = self._held.lstrip()
        if stripped.startswith(self._open):
            if self._apart:
                self._held = stripped[len(self._open) :]
            self._state, self._at_begin = "reasoning", self._apart
            self.has_reasoning = True
            return True
        if self._open.startswith(stripped):
            return False
        self._state = "reasoning" if self._inside else "content"
        self.has_reasoning, self._at_begin = self._inside, self._inside and self._apart
        return True

    def _reason(self, parts: list[Part]) -> None:
        end = self._held.find(self._close)
        if end >= 0:
            behind = end + len(self._close)
            self._take("reasoning", self._held[:end].rstrip() if self._apart else self._held[:behind], parts)
            self._held = self._held[behind:]
            self._state, self._at_begin = "content", self._apart
            return
        keep = partial_suffix(self._held, self._close)
        safe = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(safe) :]
        self._take("reasoning", safe, parts)

    def _take(self, kind: Literal["reasoning", "content"], text: str, parts: list[Part]) -> None:
        if self._at_begin:
            text = text.lstrip()
            self._at_begin = not text
        if text:
            parts.append(Part(kind, text))
