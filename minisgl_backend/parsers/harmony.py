"""Harmony, the format of gpt-oss: reasoning, content and calls are messages on channels.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>CONTENT<|return|>

The prompt ends with `<|start|>assistant`. Text without a header, as a grammar makes it, is content. Source: OpenAI's
description of the format, https://cookbook.openai.com/articles/openai-harmony.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.parsers.headers import MAX_HEADER, NameFinder
from minisgl_backend.parsers.json_reader import JsonReader
from minisgl_backend.parsers.parts import STOP, HoldingParser, Part, content, partial_suffix

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BEGINS = ("<|start|>", "<|channel|>", "<|constrain|>", "to=", "assistant")
_RECIPIENT = re.compile(r"(?:^|\s|>)to=functions\.")
_BEHIND_NAME = re.compile(r"\s*(?:json\s*)?(?:<\||\Z)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

_Kind = Literal["reasoning", "content", "call", "other", "nothing"]  # other: to a function that was not offered


class HarmonyParser(HoldingParser):
    """One choice of one answer: its reasoning, content and calls. White space around a message is dropped.

    Tags within the strings of a message to a function are text.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments; calls of other functions are content."""
        super().__init__()
        self._names = NameFinder(functions)
        self._state: Literal["header", "body", "object", "damaged"] = "header"
        self._kind: _Kind = "content"
        self._name = ""
        self._raw: list[str] = []  # the message to a function so far, with its header
        self._object: JsonReader | None = None  # the arguments of a message to a function
        self._at_begin = True  # at the start of a message
        self._has_text: dict[str, bool] = {}  # kinds of parts that have text already
        self.count = 0
        self.has_reasoning = False

    @property
    def is_damaged(self) -> bool:
        return self._state == "damaged"

    @property
    def thinking(self) -> bool:
        return self._state == "body" and self._kind == "reasoning"

    def _advance(self, parts: list[Part]) -> None:
        self._read(parts, is_last=False)

    def _ignores_space(self) -> bool:
        return self._state in ("header", "body")

    def _end(self, parts: list[Part], reason: str) -> None:
        if self._state == "header" and (bare := self._held.strip()):
            is_header = bare.startswith(_BEGINS) and "<|" in bare  # not a text that merely begins like one
            if not is_header:
                self._begin("")
        self._read(parts, is_last=True)
        if self._state == "object" and self._object is not None:
            parts += self._damage(is_begun=True)
        elif self._state == "body" and self._kind in ("call", "other"):  # nothing stands behind its header
            parts += self._without_arguments() if reason == STOP else content("".join(self._raw))

    def _read(self, parts: list[Part], *, is_last: bool) -> None:
        goes_on = True
        while goes_on:
            if self._state == "header":
                goes_on = self._header()
            elif self._state == "object":
                goes_on = self._arguments(parts)
            elif self._state == "damaged":
                parts += content(self._held)
                self._held, goes_on = "", False
            else:
                goes_on = self._body(parts, is_last=is_last)

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
        self._raw = [bare[: end + len(_MESSAGE)]]
        return True

    def _begin(self, header: str) -> None:
        """Starts a message; `header`: all before its text, "" if there is none."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._state, self._at_begin, self._object, self._raw = "body", True, None, []
        if recipient is not None:
            self._name = self._names.longest(header, recipient.end(), _BEHIND_NAME) or ""
            self._kind = "call" if self._name else "other"
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
            self.has_reasoning = self.has_reasoning or self._kind == "reasoning"

    def _body(self, parts: list[Part], *, is_last: bool) -> bool:
        """Emits the part of the message that is certain; True if something else follows."""
        if self._kind in ("call", "other"):
            return self._of_function(parts)
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
        self._emit(text, parts)
        if found:
            self._state = "header"
        return bool(found)

    def _of_function(self, parts: list[Part]) -> bool:
        """What a message to a function begins with: an object, or nothing."""
        bare = self._held.lstrip()
        behind = bare.removeprefix("null").lstrip()
        if any(tag.startswith(behind) and tag != behind for tag in _ENDS) or "null".startswith(bare):
            return False
        self._raw.append(self._held[: len(self._held) - len(bare)])
        self._held = bare
        if bare.startswith("{"):
            self._object, self._state = JsonReader(), "object"
            if self._kind == "call":
                parts.append(Part("call", self._name, self.count))
                self.count += 1
        elif behind.startswith(_ENDS):
            parts += self._without_arguments()
            self._held, self._state = behind, "header"
        else:
            parts += self._damage(is_begun=False)
        return True

    def _without_arguments(self) -> list[Part]:
        if self._kind == "other":
            return []
        self.count += 1
        return [Part("call", self._name, self.count - 1), Part("arguments", "{}", self.count - 1)]

    def _arguments(self, parts: list[Part]) -> bool:
        if self._object is None:
            raise RuntimeError("no object has begun")
        end, told = self._object.feed(self._held)
        self._raw.append(self._held[:end])
        self._held = self._held[end:]
        if told and self._kind == "call":
            parts.append(Part("arguments", told, self.count - 1))
        if self._object.state == "broken":
            parts += self._damage(is_begun=True)
        elif self._object.state == "done":
            if self._kind == "other":
                self._emit("".join(self._raw[1:]), parts, kind="content")
            self._state, self._kind = "body", "nothing"
        return self._object.state != "open"

    def _damage(self, *, is_begun: bool) -> list[Part]:
        """The rest of the answer is content. `is_begun`: the call was emitted."""
        self._state, raw = "damaged", "".join(self._raw)
        return [Part("broken", raw, self.count - 1)] if is_begun and self._kind == "call" else content(raw)

    def _emit(self, text: str, parts: list[Part], kind: Literal["reasoning", "content"] | None = None) -> None:
        if kind is None and self._kind in ("reasoning", "content"):
            kind = "reasoning" if self._kind == "reasoning" else "content"
        if self._at_begin:
            text = text.lstrip()
        if kind is None or not text:
            return
        if self._at_begin and self._has_text.get(kind):
            text = "\n" + text
        self._at_begin, self._has_text[kind] = False, True
        parts.append(Part(kind, text))
