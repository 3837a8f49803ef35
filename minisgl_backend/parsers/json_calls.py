"""A tool call as JSON, parsed incrementally: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from minisgl_backend.parsers.json_reader import SPACE, JsonReader, object_as_json
from minisgl_backend.parsers.parts import Part, content, without_surrogates

_ARGUMENTS = ("arguments", "parameters")
_BESIDE = {"name", "type", "id"}  # keys of a call without arguments where not every object is a call

Outcome = Literal["open", "emitted", "none", "damaged"]


class Calls:
    """The calls of one answer, one after the other. A call is emitted once its name is known and its arguments
    begin."""

    def __init__(self, names: Collection[str] | None, *, needs_arguments: bool = False, count: int = 0) -> None:
        """`names`: only these are calls; None: any. `needs_arguments`: an object with other keys instead of them is no
        call. `count`: number of calls before these."""
        self._names = names
        self._needs_arguments = needs_arguments
        self._call: _Call | None = None
        self._opening = ""
        self.count = count  # number of emitted calls

    @property
    def is_open(self) -> bool:
        """A call has begun and not ended."""
        return self._call is not None

    def begin(self, opening: str = "") -> None:
        """An object begins behind the text `opening`, which is content if that is not a call."""
        self._opening = opening
        self._call = _Call(self.count, self._names, needs_arguments=self._needs_arguments)

    def read(self, text: str, parts: list[Part]) -> tuple[str, Outcome]:
        """The rest of the text, and whether the call is open, was emitted, is another object (`none`), or damaged: then
        all that follows is content. What is no call has become content."""
        call = self._call
        if call is None:
            raise RuntimeError("no call has begun")
        rest = text[call.feed(text, parts) :]
        if call.state == "open":
            return rest, "open"
        return rest, self._end(call, parts)

    def finish(self, parts: list[Part]) -> Outcome:
        """The text ends within the call."""
        call = self._call
        if call is None:
            raise RuntimeError("no call has begun")
        return self._end(call, parts)

    def _end(self, call: _Call, parts: list[Part]) -> Outcome:
        self._call = None
        if call.has_arguments:
            self.count += 1
            return "emitted"
        if call.emitted:
            self.count += 1
            parts.append(Part("broken", self._opening + call.raw, self.count - 1))
            return "damaged"
        parts += content(self._opening + call.raw)
        return "none" if call.state == "done" else "damaged"


class _Call:
    """Reads one JSON object {"name": ..., "arguments": {...}}."""

    def __init__(self, index: int, names: Collection[str] | None, *, needs_arguments: bool) -> None:
        self._index = index
        self._names = names
        self._needs_arguments = needs_arguments
        self.state: Literal["open", "done", "failed"] = "open"
        self.emitted = False
        self.has_arguments = False  # all of them were emitted
        self._raw: list[str] = []
        self._expects: Literal["object", "first key", "key", "colon", "value", "comma"] = "object"
        self._reader: JsonReader | None = None  # of the key or value being read
        self._value: list[str] = []
        self._key = ""
        self._keys: set[str] = set()
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name, or as a string
        self._is_other = False  # an object that is no call
        self._streams = False  # the value being read is the arguments of an emitted call

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    def feed(self, text: str, parts: list[Part]) -> int:
        """Returns the number of characters read: all, or up to the object's end."""
        position = 0
        fresh: list[str] = []  # arguments since the last part
        while position < len(text) and self.state == "open":
            if self._reader is None:
                position = self._outside(text, position, fresh, parts)
                continue
            position, told = self._reader.feed(text, position)
            (fresh if self._streams else self._value).append(told)
            if self._reader.state == "broken":
                self.state = "failed"
            elif self._reader.state == "done":
                self._reader = None
                self._end_text()
        self._raw.append(text[:position])
        if any(fresh):
            parts.append(Part("arguments", "".join(fresh), self._index))
        return position

    def _outside(self, text: str, position: int, fresh: list[str], parts: list[Part]) -> int:
        char, expects = text[position], self._expects
        if char in SPACE:
            pass
        elif expects == "object" and char == "{":
            self._expects = "first key"
        elif expects in ("first key", "key") and char == '"':
            self._reader, self._value = JsonReader(), []
            return position
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects == "value" and char not in ",:]}":
            self._begin_value(char, parts)
            return position
        elif expects == "comma" and char == ",":
            self._expects = "key"
        elif expects in ("comma", "first key") and char == "}":
            self._end(fresh, parts)
        else:
            self.state = "failed"
            return position  # perhaps part of the tag that closes the call
        return position + 1

    def _begin_value(self, char: str, parts: list[Part]) -> None:
        self._reader, self._value = JsonReader(), []
        first = self._early is None and not self.emitted
        if char == "{" and self._key in _ARGUMENTS and self._name is not None and first and not self._is_other:
            self._emit(parts)
            self._streams = True

    def _end_text(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._value)
        if self._expects in ("first key", "key"):
            self._key, self._expects = _decode(text) or "", "colon"
            self._keys.add(self._key)
            return
        self._expects = "comma"
        if self._streams:
            self._streams, self.has_arguments = False, True
        elif self._key == "name" and self._name is None:
            self._name = _decode(text)
            is_other = not self._name or (self._names is not None and self._name not in self._names)
            self._is_other = self._is_other or is_other
        elif self._key in _ARGUMENTS and self._early is None and not self.emitted:
            if text.startswith('"'):
                text = (_decode(text) or "").strip()
            self._early = "{}" if text in ("", "null") else object_as_json(text)
            self._is_other = self._is_other or self._early is None  # a list or a number, which no function takes

    def _end(self, fresh: list[str], parts: list[Part]) -> None:
        self.state = "done"
        if self.emitted or self._is_other or self._name is None:
            return
        if self._early is None and self._needs_arguments and not self._keys <= _BESIDE:
            return
        self._emit(parts)
        fresh.append(self._early or "{}")
        self.has_arguments = True

    def _emit(self, parts: list[Part]) -> None:
        self.emitted = True
        parts.append(Part("call", self._name or "", self._index))


def _decode(text: str) -> str | None:
    """The text that a JSON string stands for; None for another value."""
    value = json.loads(text) if text.startswith('"') else None
    return without_surrogates(value) if isinstance(value, str) else None
