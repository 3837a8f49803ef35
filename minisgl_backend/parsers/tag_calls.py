"""The calls that tags have begun so far: what was read of them, what is told of them, and the value being read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from minisgl_backend.parsers.argument_types import ArgumentTypes, as_json, converted
from minisgl_backend.parsers.headers import Named
from minisgl_backend.parsers.parts import Part, content
from minisgl_backend.parsers.tag_reader import TagReader
from minisgl_backend.parsers.tagged import Outcome


class _Begun(NamedTuple):
    """A call: its number, None if its function was not offered, and how long `_raw` and `_told` were before it."""

    number: int | None
    raw: int
    told: int


@dataclass(slots=True)
class _Value:
    """The value being read."""

    header: re.Match[str] | None = None
    may_be_text: bool = False
    streams: bool = False
    is_open: bool = True
    texts: list[str] = field(default_factory=list)
    depth: int = 0  # arguments opened within it
    num_ends: int = 0  # closing tags within it that could have been its own
    end: str = ""  # the tags of the call's end, in case they are part of it
    is_odd_end: bool = False  # half of them are missing
    quotes: bool = False  # a call or an argument begins within it

    def open_argument(self) -> None:
        """Another argument begins within it."""
        self.depth += 1
        self.quotes = True

    def open_call(self) -> None:
        """A call begins within it."""
        self.quotes = True

    def complete_end(self, tags: str) -> None:
        """The rest of the call's end has come."""
        self.end += tags
        self.is_odd_end = False


class TagCalls(TagReader):
    """What the steps of TagValuesParser share."""

    BEHIND: ClassVar[str] = ""  # a tag that may follow a call
    HAS_LINES: ClassVar[bool] = False  # a value begins in a line of its own

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._value = _Value(is_open=False)
        self._expects_behind = False  # the tag BEHIND may follow
        self._searched = 0  # how much of the text behind a call was

    def begin(self, tag: str) -> None:
        self._tag = tag
        self._calls: list[_Begun] = []
        self._raw: list[str] = []  # all since the first of these calls
        self._told: list[Part] = []
        self._stage: Literal["header", "between", "value", "end"] = "header"

    def may_be_text(self, header: re.Match[str]) -> bool:
        """Whether the value behind this header may be a string."""
        types = self._types.of(header["key"])
        return types is None or "string" in types

    def as_value(self, header: re.Match[str], text: str) -> str:
        """The value as JSON."""
        key = header["key"]
        return converted(self._types.chosen(key, text), self._types.of(key))

    def _take(self, end: int) -> None:
        self._raw.append(self._text[self._at : end])
        self._at = end

    def _take_value(self, end: int) -> None:
        text = self._text[self._at : end]
        self._take(end)
        self._add(text)

    def _add(self, text: str) -> None:
        if not text:
            return
        value = self._value
        begins = not value.texts
        if begins and self.HAS_LINES:
            text = text.removeprefix("\n")
        value.texts.append(text)
        if value.streams:
            self._argument('"' * begins + as_json(text)[1:-1])

    def _quote(self, end: int, *, is_end: bool) -> None:
        """A closing tag is part of the value. `is_end`: it might end a call or a value."""
        self._value.num_ends += is_end
        self._value.depth = max(0, self._value.depth - 1)
        self._take_value(end)

    def _go_on(self, end: int) -> None:
        """What looked like the call's end was part of the value."""
        self._add(self._value.end)
        self._take_value(end)
        self._value.num_ends += 1
        self._stage = "value"

    def _begin_call(self, header: Named) -> None:
        self._calls.append(_Begun(self.count if header.name else None, len(self._raw) - 1, len(self._told)))
        self._is_other, self._types = not header.name, ArgumentTypes(self.functions.get(header.name, {}))
        self._keys: list[str] = []
        if not self._is_other:
            self._told.append(Part("call", header.name, self.count))
            self.count += 1
            self._argument("{")
        self._take(header.end)
        self._stage = "between"

    def _next_call(self, header: Named, tag: re.Match[str]) -> None:
        self._commit()
        between = self._text[self._at : tag.start()]
        opening = self._text[self._at + len(between.rstrip()) : tag.end()]
        for one in self.AROUND:
            between = between.replace(one, "")
        self._told += content(between.rstrip())
        self._take(tag.start())
        self._raw.append(opening)
        self._at = tag.end()
        self._begin_call(header)

    def _begin_value(self, header: re.Match[str]) -> None:
        self._argument((", " if self._keys else "") + as_json(header["key"]) + ": ")
        self._keys.append(header["key"])
        is_text = self._types.of(header["key"]) == {"string"} and not self._types.has_choices(header["key"])
        self._value = _Value(header, may_be_text=self.may_be_text(header), streams=self.STREAMS and is_text)
        self._stage = "value"

    def _close_value(self) -> None:
        value = self._value
        value.is_open = False
        if value.streams:
            self._argument('"' if value.texts else '""')
        elif value.header is not None:
            self._argument(self.as_value(value.header, "".join(value.texts)))
        self._stage = "between"

    def _end_call(self, end: int, quoted: str, *, is_odd: bool = False) -> None:
        """`quoted`: the tags at the end, from the value's own, as text if the value goes on."""
        self._take(end)
        value = self._value
        if value.is_open and not value.may_be_text:
            self._close_value()
        value.end, value.is_odd_end = quoted, is_odd and value.is_open
        self._searched, self._expects_behind = 0, bool(self.BEHIND)
        self._stage = "end"

    def _commit(self) -> Outcome:
        """The call is one, or a whole call of a function that was not offered."""
        if self._value.is_open:
            self._close_value()
        if self._is_other:
            self._told += content("".join(self._raw[self._calls[-1].raw :]))
        else:
            self._argument("}")
        return "read"

    def _damage(self, first: int = -1) -> Outcome:
        """The calls from that one on are none after all."""
        begun = self._calls[first:]
        if self.STREAMS:
            begun = [one for one in begun if one.number is not None] or begun[-1:]
        text, number = "".join(self._raw[begun[0].raw :]), begun[0].number
        if self.STREAMS and number is not None:
            self._told.append(Part("broken", text, number))
        else:
            if not self.STREAMS:
                del self._told[begun[0].told :]
            self._told += content(text)
        self._value.is_open = False
        return "damaged"

    def _argument(self, text: str) -> None:
        if not text or self._is_other:
            return
        number, last = self.count - 1, self._told[-1] if self._told else None
        if last is not None and last.kind == "arguments":
            self._told[-1] = last._replace(text=last.text + text)
        else:
            self._told.append(Part("arguments", text, number))
