"""The tags of calls whose arguments are tags of their own: where a call and an argument begin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from minisgl_backend.parsers.headers import MAX_HEADER, MORE, NONE, Header, Named, Step, follow, skip_space
from minisgl_backend.parsers.parts import STOP
from minisgl_backend.parsers.tagged import TaggedParser

_OTHER_NAME = re.compile(r"[^<>\n\"]+")  # of a function that was not offered
MAX_TAG = 64  # characters


class TagReader(TaggedParser):
    """Finds the headers of calls and arguments. A subclass names the tags."""

    HEADER: ClassVar[Header]  # around the function's name, behind the tag that begins the call
    OPEN: ClassVar[str]  # begins an argument
    KEY: ClassVar[re.Pattern[str]]  # all before its value: `key`
    KEY_STEPS: ClassVar[tuple[Step, ...]]  # the same, which shows whether it is complete
    CLOSE: ClassVar[str]  # ends a value
    ENDS: ClassVar[tuple[str, ...]]  # one of them ends a call
    STREAMS: ClassVar[bool] = False  # texts are told as they are written

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._text = ""
        self._at = 0  # what stands before was taken

    def header_of(self, tag: str) -> Header:
        """What stands around a function's name behind that tag."""
        return self.HEADER

    def _named(self, position: int, tag: str, is_last: bool) -> Named | int:
        """The header of a call behind `tag`; its name is empty if the function was not offered. MORE, NONE."""
        text, header = self._text[position : position + MAX_HEADER], self.header_of(tag)
        is_last = is_last or len(text) == MAX_HEADER
        found = self.names.find(text, header, is_last=is_last)
        if isinstance(found, Named):
            follows = position + found.end if self.STREAMS else self._goes_on(position + found.end, is_last)
            if follows >= 0:
                return Named(found.name, position + found.start, position + found.end)
            return follows
        if found == MORE:
            return MORE
        end = follow(text, 0, (*header.before, _OTHER_NAME, *header.behind))
        if end == MORE:
            return NONE if is_last else MORE
        follows = NONE if end == NONE else self._goes_on(position + end, is_last)
        return Named("", position, position + end) if follows >= 0 else follows

    def _goes_on(self, position: int, is_last: bool) -> int:
        """Whether the inside of a call follows: the position if so; MORE, NONE."""
        start = skip_space(self._text, position)
        if self._text.startswith((self.OPEN, *self.ENDS), start):
            return start
        if is_last:
            return start if start == len(self._text) and self.reason == STOP else NONE
        return MORE if self._may_begin(start, (self.OPEN, *self.ENDS)) else NONE

    def _key_at(self, start: int, is_last: bool) -> re.Match[str] | int:
        """The header of an argument; MORE, NONE."""
        if not self._text.startswith(self.OPEN, start):
            return NONE
        end = follow(self._text[start : start + MAX_HEADER], 0, self.KEY_STEPS)
        if end == MORE and not is_last and len(self._text) - start < MAX_HEADER:
            return MORE
        found = self.KEY.match(self._text, start) if end >= 0 else None
        return NONE if found is None else found

    def _may_begin(self, start: int, tags: tuple[str, ...]) -> bool:
        """Whether the rest of the text may be the beginning of one of these tags."""
        rest = self._text[start : start + MAX_TAG]
        return any(tag.startswith(rest) for tag in tags)
