"""Harmony, the format of gpt-oss: reasoning, content and calls are messages on channels.

    <|channel|>analysis<|message|>THOUGHTS<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The prompt ends with `<|start|>assistant`. Text without a header, as a grammar makes it, is content. Source: OpenAI's
description of the format, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.parsers.parts import Part, partial_suffix
from minisgl_backend.parsers.tagged import MAX_HEADER, JsonObject

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINS = ("<|start|>", "<|channel|>", "<|constrain|>", "to=", "assistant")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=functions\.([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

_Kind = Literal["reasoning", "content", "call", "nothing"]


class HarmonyParser:
    """One choice of one answer: its reasoning, content and calls. White space around a message is dropped."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments; calls of other functions are content."""
        self._functions = functions
        self._held = ""
        self._in_header = True
        self._kind: _Kind = "content"
        self._name = ""
        self._raw = ""  # the header of a call that has not been emitted yet
        self._object: JsonObject | None = None  # the arguments of an emitted call
        self._at_begin = True  # at the start of a message
        self._is_cut = False  # the answer ended at max_tokens
        self._has_text: dict[str, bool] = {}  # kinds of parts that have text already
        self.count = 0
        self.has_thought = False

    @property
    def thinking(self) -> bool:
        return not self._in_header and self._kind == "reasoning"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._header() if self._in_header else self._body(parts, is_last=False):
            pass
        return parts

    def finish(self, reason: str) -> list[Part]:
        self._is_cut = reason == "length"
        parts: list[Part] = []
        if self._in_header and (bare := self._held.strip()):
            is_header = bare.startswith(_BEGINS) and "<|" in bare  # not a text that merely begins like one
            if not is_header:
                self._begin("")
        if not self._in_header:
            while self._body(parts, is_last=True):
                pass
        self._held = ""
        return parts

    def _header(self) -> bool:
        """Reads up to the message's text; False while the header is incomplete."""
        bare = self._held.lstrip()
        if not bare or any(tag.startswith(bare) for tag in (*_BEGINS, *_ENDS, _MESSAGE)):
            return False
        for tag in _ENDS[:3]:  # of a message without a header, or of one that is emitted already
            if bare.startswith(tag):
                self._held = bare[len(tag) :]
                return True
        end = bare.find(_MESSAGE, 0, MAX_HEADER)
        if not bare.startswith((*_BEGINS, _MESSAGE)) or (end < 0 and len(bare) >= MAX_HEADER):
            self._begin("")
            return True
        if end < 0:
            return False
        self._held = bare[end + len(_MESSAGE) :]
        self._begin(bare[:end])
        self._raw = bare[: end + len(_MESSAGE)]
        return True

    def _begin(self, header: str) -> None:
        """Starts a message; `header`: all before its text, "" if there is none."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._in_header, self._at_begin, self._object, self._raw = False, True, None, ""
        if recipient is not None and recipient[1] in self._functions:
            self._kind, self._name = "call", recipient[1]
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            self.has_thought = self.has_thought or self._kind == "reasoning"

    def _body(self, parts: list[Part], *, is_last: bool) -> bool:
        """Emits the part of the message that is certain; True if the message has ended."""
        found = [(position, tag) for tag in _ENDS if (position := self._held.find(tag)) >= 0]
        if found:
            position, tag = min(found)
            text, self._held = self._held[:position].rstrip(), self._held[position:]
            if tag not in ("<|start|>", "<|channel|>"):
                self._held = self._held[len(tag) :]
        else:
            keep = 0 if is_last else max(partial_suffix(self._held, tag) for tag in _ENDS)
            text = self._held[: len(self._held) - keep].rstrip() if not is_last else self._held.rstrip()
            self._held = "" if is_last else self._held[len(text) :]
        self._emit(text, parts, is_whole=bool(found) or (is_last and not self._is_cut))
        self._in_header = bool(found)
        return bool(found)

    def _emit(self, text: str, parts: list[Part], *, is_whole: bool) -> None:
        if self._at_begin:
            text = text.lstrip()
            if text or (is_whole and self._kind == "call"):
                self._at_begin = False
                text = self._first(text, parts)
        if self._object is not None:
            text = "" if self._object.is_done else text[: self._object.feed(text)]
        if text and self._kind != "nothing":
            kind: Literal["reasoning", "content", "arguments"] = "arguments" if self._kind == "call" else self._kind
            parts.append(Part(kind, text, self.count - 1 if kind == "arguments" else 0))

    def _first(self, text: str, parts: list[Part]) -> str:
        """Handles the beginning of a message's text."""
        if self._kind == "call":
            if text and not text.startswith("{"):  # no arguments: the text is content
                self._kind = "content"
                text = self._raw + text
            else:
                parts.append(Part("call", self._name, self.count))
                self.count += 1
                self._object = JsonObject()
                return text or "{}"
        separate = "\n" if self._has_text.get(self._kind) else ""
        self._has_text[self._kind] = True
        return separate + text
