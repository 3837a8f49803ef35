"""How the values of a schema are written: as JSON, or as models write the arguments of their calls.

Gemma 4's are those of its chat template (`format_argument`), Python's those of its language reference, of which only
literals between double quotes are written.
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
    """The defaults are those of `json.dumps`."""

    comma: str = ", "
    colon: str = ": "
    words: Mapping[bool | None, str] = field(default_factory=lambda: {None: "null", False: "false", True: "true"})
    quote: str = '"'
    escapes: Mapping[int, str] = field(default_factory=lambda: _SHORT_ESCAPES)  # behind a backslash
    has_escapes: bool = True  # else a text is what stands between the quotes, and does not hold them
    has_pairs: bool = True  # \u twice for a character beyond U+FFFF
    bare: Regex = rx.NOTHING  # names of properties that are written without quotes
    root: Kind | None = None  # the outermost value is one of these; None: any
    is_call: bool = False  # the outermost object is named arguments in Python: NAME=VALUE, or **{"NAME": VALUE}

    def can_write(self, text: str) -> bool:
        return self.has_escapes or self.quote not in text

    def text(self, text: str) -> str:
        """With its quotes."""
        return json.dumps(text, ensure_ascii=False) if self.has_escapes else f"{self.quote}{text}{self.quote}"

    def pair(self, name: str, *, is_argument: bool = False) -> tuple[str, str]:
        """What stands before and behind a property's value. `is_argument`: of the outermost object of a call."""
        if is_argument:
            return (f"{name}=", "") if rx.matches(ARGUMENT, name) else (f"**{{{self.text(name)}: ", "}")
        return (name if rx.matches(self.bare, name) else self.text(name)) + self.colon, ""


# Names that Python takes as they are.
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
# By the styles of a structural tag's json_schema; those ending in `_xml` are xgrammar's.
NOTATIONS = {"json": JSON, "gemma": _GEMMA, "python": _PYTHON}
