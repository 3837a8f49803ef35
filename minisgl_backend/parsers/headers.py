"""Where a text names one of the request's functions: names hold any letters, so they are looked for, not read."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from minisgl_backend.parsers.json_reader import SPACE

MAX_HEADER = 512  # characters before a call's arguments; more means that it is not a call
MORE, NONE = -1, -2  # instead of a position: more text decides; it is not there

Step = str | re.Pattern[str]  # a text, with ? before it one that may be missing; a pattern that matches anything there


@dataclass(frozen=True)
class Header:
    """What stands around a function's name; white space may stand between all of it."""

    before: tuple[Step, ...] = ()
    behind: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Named:
    name: str
    start: int  # of the name
    end: int  # of the header


def skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position


def follow(text: str, position: int, steps: Sequence[Step]) -> int:
    """Where the steps end; MORE, or NONE."""
    for step in steps:
        start = skip_space(text, position)
        if isinstance(step, re.Pattern):
            found = step.match(text, start)
            if found is None:
                return NONE if start < len(text) else MORE
            if found.end() == len(text):
                return MORE
            position = found.end()
            continue
        literal = step.removeprefix("?")
        if text.startswith(literal, start):
            position = start + len(literal)
        elif len(text) - start < len(literal) and literal.startswith(text[start:]):
            return MORE
        elif literal == step:
            return NONE
    return position


class NameFinder:
    """Finds the names of one request's functions."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = sorted((name for name in names if name), key=len, reverse=True)

    def longest(self, text: str, position: int, behind: re.Pattern[str]) -> str | None:
        """The longest name at that position of a complete text that `behind` matches behind."""
        for name in self._names:
            if text.startswith(name, position) and behind.match(text, position + len(name)):
                return name
        return None

    def find(self, text: str, header: Header, *, is_last: bool) -> Named | int:
        """The longest name that the header fits around, at the start of a text that may go on; MORE or NONE."""
        begin = follow(text, 0, header.before)
        if begin < 0:
            return NONE if is_last else begin
        for name in self._names:
            for start in range(begin, skip_space(text, begin) + 1):  # a name may begin with white space
                if text.startswith(name, start):
                    end = follow(text, start + len(name), header.behind)
                    if end == MORE and is_last:
                        end = self._end_of_all(text, start + len(name), header)
                    if end >= 0:
                        return Named(name, start, end)
                    if end == MORE:
                        return MORE
                elif not is_last and len(text) - start < len(name) and name.startswith(text[start:]):
                    return MORE
        return NONE

    def _end_of_all(self, text: str, position: int, header: Header) -> int:
        """The header's end where the text ends: what may be missing is."""
        needed = [step for step in header.behind if not (isinstance(step, str) and step.startswith("?"))]
        end = follow(text, position, needed)
        return NONE if end == MORE else end
