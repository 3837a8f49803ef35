"""A tool call as JSON, parsed incrementally: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from minisgl_backend.parsers.parts import Part, may_be_function, without_surrogates

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class Calls:
    """The calls of one answer, one after the other. A call is emitted once its name is known and its arguments
    begin."""

    def __init__(self, names: Collection[str] | None = None, *, needs_arguments: bool = False) -> None:
        """`names`: only these are calls; None: any. `needs_arguments`: an object without them is not a call."""
        self._names = names
        self._needs_arguments = needs_arguments
        self._call: _Call | None = None
        self.count = 0  # number of completed calls
        self.pending: str | None = None  # text of the last call until it is emitted; None afterwards

    @property
    def is_open(self) -> bool:
        """A call has begun and not ended."""
        return self._call is not None

    def begin(self) -> None:
        self.pending = ""
        self._call = _Call(self.count, self._names, needs_arguments=self._needs_arguments)

    def read(self, text: str, parts: list[Part]) -> tuple[str, Literal["open", "emitted", "none"]]:
        """The rest of the text, and whether the call is open, was emitted, or turned out not to be one."""
        call = self._call
        if call is None:
            raise RuntimeError("no call has begun")
        rest = text[call.feed(text, parts) :]
        self.pending = None if call.emitted else call.raw
        if call.state == "open":
            return rest, "open"
        self._call = None
        self.count += call.emitted
        return rest, "emitted" if call.emitted else "none"


class _Call:
    """Reads one JSON object {"name": ..., "arguments": {...}}, character by character."""

    def __init__(self, index: int, names: Collection[str] | None, *, needs_arguments: bool) -> None:
        """`names`: only these are calls; None: any."""
        self._index = index
        self._names = names
        self._needs_arguments = needs_arguments
        self.state: Literal["open", "done", "failed"] = "open"
        self.raw = ""  # all characters read, until the call is emitted
        self.emitted = False
        self._expects = "object"
        self._key = ""
        self._value: list[str] = []  # the value being read
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name
        self._streams = False  # the value being read is the arguments of an emitted call

    def feed(self, text: str, parts: list[Part]) -> int:
        """Returns the number of characters read: all, or up to the object's end."""
        fresh: list[str] = []  # arguments since the last part
        for number, character in enumerate(text):
            if not self.emitted:
                self.raw += character
            self._read(character, fresh, parts)
            if self.state != "open":
                self._flush(fresh, parts)
                if self.state == "failed" and self.emitted:
                    return number  # not part of the call, but perhaps of the tag that closes it
                return number + 1
        self._flush(fresh, parts)
        return len(text)

    def _read(self, character: str, fresh: list[str], parts: list[Part]) -> None:
        if self._expects == "value":
            self._read_value(character, fresh, parts)
        elif self._expects == "key":
            self._read_key(character)
        elif character in SPACE:
            pass
        elif self._expects == "object" and character == "{":
            self._expects = "first key"
        elif self._expects in ("first key", "next key") and character == '"':
            self._expects, self._key = "key", '"'
        elif self._expects == "colon" and character == ":":
            self._expects = "value begin"
        elif self._expects == "value begin":
            self._begin_value(character, fresh, parts)
        elif self._expects == "comma" and character == ",":
            self._expects = "next key"
        elif self._expects in ("comma", "first key") and character == "}":
            self._end(fresh, parts)
        else:
            self.state = "failed"

    def _read_key(self, character: str) -> None:
        self._key += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._key = _decode(self._key, "")
            self._expects = "colon"

    def _begin_value(self, character: str, fresh: list[str], parts: list[Part]) -> None:
        if character in ",:]}":
            self.state = "failed"
            return
        self._expects, self._value, self._depth = "value", [], 0
        if character == "{" and self._key in _ARGUMENTS and self._name is not None and self._early is None:
            if not self._emit(parts):
                return
            self._early, self._streams = "", True
        self._read_value(character, fresh, parts)

    def _read_value(self, character: str, fresh: list[str], parts: list[Part]) -> None:
        if not self._in_string and self._depth == 0 and self._value and character in ",}" + SPACE:
            self._end_value(parts)  # a number or a word ends at the next character
            if self.state == "open":
                self._read(character, fresh, parts)
            return
        (fresh if self._streams else self._value).append(character)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value(parts)
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(parts)

    def _end_value(self, parts: list[Part]) -> None:
        self._expects = "comma"
        if self._streams:
            self._streams = False
            return
        text = "".join(self._value)
        if self._key == "name" and self._name is None:
            self._name = _decode(text, None)
            if not self._name:
                self.state = "failed"
        elif self._key in _ARGUMENTS and self._early is None:
            if text.startswith('"'):
                text = _decode(text, None).strip()
            if text in ("", "null"):
                text = "{}"
            if not text.startswith("{"):  # a list or a number, which no function takes
                self.state = "failed"
                return
            self._early = text

    def _end(self, fresh: list[str], parts: list[Part]) -> None:
        if self.emitted:
            self.state = "done"
            return
        if self._name is None or (self._needs_arguments and self._early is None):
            self.state = "failed"
        elif self._emit(parts):
            self.state = "done"
            fresh.append(self._early or "{}")

    def _emit(self, parts: list[Part]) -> bool:
        if (self._names is not None and self._name not in self._names) or not may_be_function(
            self._name or "", self._names
        ):
            self.state = "failed"
            return False
        self.emitted, self.raw = True, ""
        parts.append(Part("call", self._name or "", self._index))
        return True

    def _flush(self, fresh: list[str], parts: list[Part]) -> None:
        if fresh:
            parts.append(Part("arguments", "".join(fresh), self._index))
            fresh.clear()


def _decode(text: str, otherwise: str | None) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        value = otherwise
    return without_surrogates(value) if isinstance(value, str) else (otherwise or "")
