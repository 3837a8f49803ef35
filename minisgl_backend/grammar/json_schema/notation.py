"""Notations for the values of a schema: JSON, and how models write the arguments of tool calls.

Gemma 4's notation is that of its chat template (`format_argument`), Python's that of its language reference, with
strings always in double quotes.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.formula import Kind
from minisgl_backend.grammar.json_schema.regex import Ranges, Regex

_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x2F: "/", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_LETTERS: Ranges = ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_DIGITS: Ranges = ((0x30, 0x39),)
_IDENTIFIER = rx.cat(rx.chars(_LETTERS), rx.repeat(rx.chars(rx.merged((*_LETTERS, *_DIGITS)))))


@dataclass(frozen=True)
class Notation:
    """The defaults are the output of `json.dumps`."""

    comma: str = ", "
    colon: str = ": "
    words: Mapping[bool | None, str] = field(default_factory=lambda: {None: "null", False: "false", True: "true"})
    quote: str = '"'
    escapes: Mapping[int, str] = field(default_factory=lambda: _SHORT_ESCAPES)  # code point -> letter after \
    has_escapes: bool = True  # False: strings are raw, and cannot contain the quote
    has_pairs: bool = True  # surrogate pairs, \u twice, for characters beyond U+FFFF
    bare: Regex = rx.NOTHING  # property names that are written without quotes
    root: Kind | None = None  # type of the outermost value; None: any
    is_call: bool = False  # the outermost object is Python keyword arguments: NAME=VALUE, or **{"NAME": VALUE}

    def can_write(self, text: str) -> bool:
        return self.has_escapes or self.quote not in text

    def text(self, text: str) -> str:
        """The string with its quotes."""
        return json.dumps(text, ensure_ascii=False) if self.has_escapes else f"{self.quote}{text}{self.quote}"

    def pair(self, name: str, *, is_argument: bool = False) -> tuple[str, str]:
        """The text before and after a property's value. `is_argument`: the property is an argument of a call."""
        if is_argument:
            return (f"{name}=", "") if rx.matches(ARGUMENT, name) else (f"**{{{self.text(name)}: ", "}")
        return (name if rx.matches(self.bare, name) else self.text(name)) + self.colon, ""


# Names that can be Python keyword arguments.
ARGUMENT = rx.both(_IDENTIFIER, rx.complement(rx.literals([*keyword.kwlist, "__debug__"])))
JSON = Notation()
_GEMMA = Notation(
    comma=",",
    colon=":",
    quote='<|"|>',
    has_escapes=False,
    bare=rx.repeat(rx.chars(rx.merged((*_LETTERS, *_DIGITS, (0x2D, 0x2E)))), 1),
    root="object",
)
_PYTHON = Notation(
    words={None: "None", False: "False", True: "True"},
    escapes={code: char for code, char in _SHORT_ESCAPES.items() if char != "/"},
    has_pairs=False,
    root="object",
    is_call=True,
)
# By the `style` of a json_schema in a structural tag; xgrammar converts the styles that end in `_xml`.
NOTATIONS = {"json": JSON, "gemma": _GEMMA, "python": _PYTHON}
