"""Calls between tags: the shared part of their parsers.

A subclass names its tags and reads one call at a time. Text that turns out not to be a call is content, unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from minisgl_backend.parsers.headers import MAX_HEADER, MORE, NONE, Header, Named, NameFinder, skip_space
from minisgl_backend.parsers.json_calls import Calls
from minisgl_backend.parsers.json_reader import SPACE, JsonReader
from minisgl_backend.parsers.parts import STOP, HoldingParser, Part, content, partial_suffix

# The call goes on; it was read to its end; the tag did not begin one; one is damaged, so that the rest is content.
Outcome = Literal["more", "read", "none", "damaged"]


class TaggedParser(HoldingParser):
    """One choice of one answer: text, and calls that begin with a tag."""

    BEGIN: ClassVar[tuple[str, ...]]  # tags that calls begin with
    AROUND: ClassVar[tuple[str, ...]] = ()  # tags around calls, which are not part of the text

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        super().__init__()
        self.functions = functions
        self.names = NameFinder(functions)
        self.count = 0  # number of calls begun
        self.opening = ""  # the tag that the current call began with, and the tags and the white space before it
        self._around = ""  # tags around the first call, which are content with it if it is none
        self.reason = STOP  # why the answer ended
        self._state: Literal["text", "call", "damaged"] = "text"

    @property
    def is_damaged(self) -> bool:
        return self._state == "damaged"

    def _advance(self, parts: list[Part]) -> None:
        while self._step(parts, is_last=False):
            pass

    def _ignores_space(self) -> bool:
        return self._state == "text"

    def _end(self, parts: list[Part], reason: str) -> None:
        """A call without its closing tag counts if it is complete and the answer ended by itself."""
        self.reason = reason
        while self._step(parts, is_last=True):
            pass

    def begin(self, tag: str) -> None:
        """A call begins after `tag`."""

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        """(what is left of the text, the call's outcome). With `none`, nothing was taken of the text."""
        raise NotImplementedError

    def emit_call(self, name: str, parts: list[Part], arguments: str = "", id: str = "") -> None:
        parts.append(Part("call", name, self.count, id))
        if arguments:
            parts.append(Part("arguments", arguments, self.count))
        self.count += 1

    def _step(self, parts: list[Part], *, is_last: bool) -> bool:
        if self._state == "damaged":
            parts += content(self._held)
            self._held = ""
            return False
        if self._state == "text":
            return self._read_text(parts, is_last=is_last)
        self._held, outcome = self.read(self._held, parts, is_last=is_last)
        if outcome == "more":
            return False
        self._state = "damaged" if outcome == "damaged" else "text"
        if outcome == "none":
            parts += content(self.opening)
        return True

    def _read_text(self, parts: list[Part], *, is_last: bool) -> bool:
        held = self._held
        found = [(position, -len(tag), tag) for tag in (*self.BEGIN, *self.AROUND) if (position := held.find(tag)) >= 0]
        if found:
            start, _, tag = min(found)
            before = held[:start].rstrip()
            parts += content(before)
            opening, self._held = held[len(before) : start + len(tag)], held[start + len(tag) :]
            self._around = ("" if before or self.count else self._around) + opening
            if tag in self.BEGIN:
                self.opening, self._around = self._around, ""
                self._state = "call"
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
        self._around = "" if safe else self._around
        return False


class JsonArgumentsParser(TaggedParser):
    """A header that names the function, then its arguments as a JSON object, which is emitted as it arrives."""

    HEADERS: ClassVar[tuple[Header, ...]]  # the first one that fits counts
    ENDS: ClassVar[tuple[str, ...]]  # what may follow the header of a call without arguments

    def begin(self, tag: str) -> None:
        self._object: JsonReader | None = None  # the object being read
        self._is_other = False  # it is a call of a function that was not offered
        self._raw: list[str] = []

    def id_of(self, header: str) -> str:
        """The call's id, which some models write into its header."""
        return ""

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if self._object is None:
            text, outcome = self._header(text, parts, is_last=is_last)
            if self._object is None:
                return text, outcome
        end, told = self._object.feed(text)
        self._raw.append(text[:end])
        if told and not self._is_other:
            parts.append(Part("arguments", told, self.count - 1))
        if self._object.state == "open" and not is_last:
            return "", "more"
        is_whole = self._object.state == "done"
        raw = self.opening + "".join(self._raw)
        if self._is_other:
            parts += content(raw)
        elif not is_whole:
            parts.append(Part("broken", raw, self.count - 1))
        return text[end:], "read" if is_whole else "damaged"

    def _header(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        """Begins the object if there is one."""
        for header in self.HEADERS:
            found = self.names.find(text, header, is_last=is_last)
            if found == MORE:
                return text, "more"
            if not isinstance(found, Named):
                continue
            end = self._behind(text, found.end, is_last=is_last)
            if end == MORE:
                return text, "more"
            signs = text[: found.start] + text[found.start + len(found.name) : found.end]
            if end == NONE and signs.strip():
                return self.opening + text, "damaged"  # its arguments are no object
            if end == NONE:
                continue
            self.emit_call(found.name, parts, "" if text[end : end + 1] == "{" else "{}", self.id_of(text[: found.end]))
            if text[end : end + 1] != "{":
                return text[end:], "read"
            self._object, self._raw = JsonReader(), [text[:end]]
            return text[end:], "more"
        # A call of another function is read to its end, since what its arguments quote is no call.
        start = text.find("{", 0, MAX_HEADER)
        another = min((place for tag in self.BEGIN if (place := text.find(tag)) >= 0), default=len(text))
        if start < 0 and another == len(text) and len(text) < MAX_HEADER and not is_last:
            return text, "more"
        if start < 0 or another < start:
            return text, "none"
        self._object, self._is_other, self._raw = JsonReader(), True, [text[:start]]
        return text[start:], "more"

    def _behind(self, text: str, position: int, *, is_last: bool) -> int:
        """Where the object begins or, without arguments, the text behind the call; MORE, NONE."""
        start = skip_space(text, position)
        if text.startswith("null", start):
            start = skip_space(text, start + len("null"))
        rest = text[start : start + MAX_HEADER]
        if rest.startswith(("{", *self.ENDS)):
            return start
        if is_last:
            return NONE if rest or self.reason != STOP else start
        return MORE if any(tag.startswith(rest) for tag in ("null", *self.ENDS)) else NONE


class JsonListParser(TaggedParser):
    """A tag, then a list of {"name": ..., "arguments": {...}}, or one of them."""

    def begin(self, tag: str) -> None:
        self._calls = Calls(self.functions, count=self.count)
        self._has_read = False  # at least one object of the list

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        while True:
            if not self._calls.is_open:
                rest = text.lstrip(SPACE + ("," if self._has_read else "["))
                if self._has_read and rest.startswith("]"):
                    return rest[1:], "read"
                if not rest and not is_last:
                    return text, "more"
                if not rest or rest[0] != "{":
                    return text, "read" if self._has_read else "none"
                self._calls.begin("" if self._has_read else self.opening + text[: len(text) - len(rest)])
                text = rest
            text, outcome = self._calls.read(text, parts)
            if outcome == "open":
                if not is_last:
                    return text, "more"
                outcome = self._calls.finish(parts)
            self._has_read = True
            self.count = self._calls.count
            if outcome == "damaged":
                return text, "damaged"
