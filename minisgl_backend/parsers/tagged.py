"""Calls between tags: the shared part of their parsers.

A subclass names its tags and reads one call at a time. Text that turns out not to be a call is content, unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from minisgl_backend.parsers.argument_types import ArgumentTypes, as_json, converted
from minisgl_backend.parsers.json_calls import SPACE, Calls
from minisgl_backend.parsers.parts import Part, content, partial_suffix

Outcome = Literal["more", "emitted", "none"]  # the call goes on; it was emitted completely; it is not a call
MAX_HEADER = 512  # before the arguments; more means that it is not a call


class TaggedParser:
    """One choice of one answer: text, and calls that begin with a tag."""

    BEGIN: ClassVar[tuple[str, ...]]  # tags that calls begin with
    AROUND: ClassVar[tuple[str, ...]] = ()  # tags around calls, which are not part of the text

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        self.functions = functions
        self.count = 0  # number of calls begun
        self._held = ""
        self._opening = ""  # the tag that the current call began with
        self._reads = False  # a call is being read
        self.is_cut = False  # the answer ended at max_tokens

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts, is_last=False):
            pass
        return parts

    def finish(self, reason: str) -> list[Part]:
        """What was held back. A call without its closing tag counts if it is complete and the answer ended by
        itself."""
        self.is_cut = reason == "length"
        parts: list[Part] = []
        while self._step(parts, is_last=True):
            pass
        return parts

    def begin(self, tag: str) -> None:
        """A call begins after `tag`."""

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        """(rest of the text, the call's outcome). With `none`, nothing was emitted and the rest is the whole text."""
        raise NotImplementedError

    def emit_call(self, name: str, parts: list[Part], arguments: str = "", id: str = "") -> None:
        parts.append(Part("call", name, self.count, id))
        if arguments:
            parts.append(Part("arguments", arguments, self.count))
        self.count += 1

    def _step(self, parts: list[Part], *, is_last: bool) -> bool:
        if not self._reads:
            return self._text(parts, is_last=is_last)
        self._held, outcome = self.read(self._held, parts, is_last=is_last)
        if outcome == "more":
            return False
        self._reads = False
        if outcome == "none":
            parts += content(self._opening)
        return True

    def _text(self, parts: list[Part], *, is_last: bool) -> bool:
        held = self._held
        found = [(position, -len(tag), tag) for tag in (*self.BEGIN, *self.AROUND) if (position := held.find(tag)) >= 0]
        if found:
            start, _, tag = min(found)
            before = held[:start].rstrip()
            parts += content(before)
            self._opening, self._held = held[len(before) : start + len(tag)], held[start + len(tag) :]
            self._reads = tag in self.BEGIN
            if self._reads:
                self.begin(tag)
            return True
        if is_last:
            parts += content(held.rstrip() if self.count else held)
            self._held = ""
            return False
        # White space is kept until it is known whether a call follows.
        keep = max(partial_suffix(held, tag) for tag in (*self.BEGIN, *self.AROUND))
        safe = held[: len(held) - keep].rstrip()
        parts += content(safe)
        self._held = held[len(safe) :]
        return False


class JsonArgumentsParser(TaggedParser):
    """A header that names the function, then its arguments as a JSON object, which is emitted as it arrives."""

    HEADER: ClassVar[re.Pattern[str]]  # all between the tag and the object: `name`, and `id` if there is one

    def begin(self, tag: str) -> None:
        self._object: JsonObject | None = None  # the object being read

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if self._object is None:
            start = text.find("{", 0, MAX_HEADER)
            if start < 0:
                return text, "none" if is_last or len(text) >= MAX_HEADER else "more"
            header = self.HEADER.fullmatch(text, 0, start)
            if header is None:
                return text, "none"
            self.emit_call(header["name"], parts, id=header.groupdict().get("id") or "")
            self._object, text = JsonObject(), text[start:]
        end = self._object.feed(text)
        if text[:end]:
            parts.append(Part("arguments", text[:end], self.count - 1))
        return text[end:], "emitted" if self._object.is_done else "more"


class JsonListParser(TaggedParser):
    """A tag, then a list of {"name": ..., "arguments": {...}}, or one of them."""

    def begin(self, tag: str) -> None:
        self._calls = Calls()
        self._emitted = False  # at least one call of the list

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if not self._calls.is_open:
            rest = text.lstrip(SPACE + ("," if self._emitted else "["))
            if self._emitted and rest.startswith("]"):
                return rest[1:], "emitted"
            if not rest:
                return text, ("emitted" if self._emitted else "none") if is_last else "more"
            if rest[0] != "{":
                return text, "emitted" if self._emitted else "none"
            self._before, text = text[: len(text) - len(rest)], rest
            self._calls.begin()
        emitted: list[Part] = []
        text, outcome = self._calls.read(text, emitted)
        for part in emitted:
            self.count += part.kind == "call"
            parts.append(part._replace(number=self.count - 1))
        self._emitted = self._emitted or bool(emitted)
        if outcome == "open":
            if not is_last:
                return text, "more"
            return self._pending_text() + text, "emitted" if self._emitted else "none"
        if outcome == "none":
            return self._pending_text() + text, "emitted" if self._emitted else "none"
        return self.read(text, parts, is_last=is_last)

    def _pending_text(self) -> str:
        """The text of the last call and the separator before it; "" once it is emitted."""
        return "" if self._calls.pending is None else self._before + self._calls.pending


class TagValuesParser(TaggedParser):
    """A call whose arguments are tags of their own, each a string or JSON: emitted once it is complete."""

    END: ClassVar[str]  # the tag that ends a call
    CALL: ClassVar[re.Pattern[str]]  # the whole call without its end: `name` and `values`
    VALUE: ClassVar[re.Pattern[str]]  # one value, with the white space around it: `key` and `value`

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        body, found, rest = text.partition(self.END)
        if not found and not is_last:
            return text, "more"
        if not found and self.is_cut:  # more arguments may have followed
            return text, "none"
        if not found:
            body = body[: len(body) - partial_suffix(body, self.END)]
        call = self.CALL.fullmatch(body)
        if call is not None and call["name"] not in self.functions:  # prose, or a function not offered
            call = None
        arguments = None if call is None else self._arguments(call["name"], call["values"])
        if call is None or arguments is None:
            return text, "none"
        self.emit_call(call["name"], parts, arguments)
        return rest, "emitted"

    def value(self, found: re.Match[str], types: ArgumentTypes) -> str:
        """The value as JSON. `found`: a match of VALUE."""
        return converted(types.chosen(found["key"], found["value"]), types.of(found["key"]))

    def _arguments(self, name: str, written: str) -> str | None:
        """The arguments as JSON; None if there is anything else between the values."""
        types, position = ArgumentTypes(self.functions.get(name, {})), 0
        found: list[str] = []
        seen: set[str] = set()
        while position < len(written):
            one = self.VALUE.match(written, position)
            if one is None or not one[0]:
                return None if written[position:].strip() else "{" + ", ".join(found) + "}"
            if one["key"] in seen:
                return None
            seen.add(one["key"])
            found.append(f"{as_json(one['key'])}: {self.value(one, types)}")
            position = one.end()
        return "{" + ", ".join(found) + "}"


class JsonObject:
    """Finds the end of a JSON object in a text that arrives in pieces."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Returns how many of the characters belong to it."""
        for number, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_done = True
                    return number + 1
        return len(text)
