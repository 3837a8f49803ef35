"""Parses patterns of JSON schemas, which are regular expressions of ECMA-262.

Supported: everything regular, including lookahead outside repetitions. Refused by name: back references, lookbehind,
word boundaries. Where ECMA-262 and Python differ (`\\s`, `\\W`, `.`), only characters that match in both are allowed.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache

from minisgl_backend.grammar.json_schema import regex as rx
from minisgl_backend.grammar.json_schema.regex import Ranges, Regex

MAX_LENGTH = 4096  # characters of a pattern
MAX_DEPTH = 50  # groups within groups
MAX_REPEATS = 1000
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACES: Ranges = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
WIDE_SPACES = rx.merged([*SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)])
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_LETTERS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0}
_CATEGORIES = {"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Number": "N", "Punctuation": "P"}


class PatternError(ValueError):
    """An invalid or unsupported pattern; the message names the part."""


@dataclass(frozen=True)
class _Look:
    """(?=...) or (?!...)."""

    regex: Regex
    positive: bool


@dataclass(frozen=True)
class _Group:
    """A group that contains a lookahead, which may also constrain the text after the group."""

    choices: tuple[tuple[_Item, ...], ...]


_Item = Regex | _Look | _Group
_AROUND = rx.repeat(rx.either([rx.ANY_CHAR, rx.chars(((rx.BEGIN, rx.END),))]))


def pattern_regex(pattern: str) -> Regex:
    """Texts in which the pattern matches somewhere. Raises PatternError."""
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"it has {len(pattern)} characters; allowed: at most {MAX_LENGTH}")
    choices = _Parser(pattern).parse()
    found = rx.cat(_AROUND, _joined(choices, _AROUND))
    return rx.anchored(rx.derivative(found, rx.BEGIN))


def _joined(choices: tuple[tuple[_Item, ...], ...], rest: Regex) -> Regex:
    found = []
    for choice in choices:
        following = rest
        for item in reversed(choice):
            if isinstance(item, Regex):
                following = rx.cat(item, following)
            elif isinstance(item, _Group):
                following = _joined(item.choices, following)
            else:
                ahead = rx.cat(item.regex, _AROUND)
                following = rx.both(ahead if item.positive else rx.complement(ahead), following)
        found.append(following)
    return rx.either(found)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> tuple[tuple[_Item, ...], ...]:
        choices = self._choices()
        if self._at < len(self._text):
            raise PatternError(f"{self._text[self._at]!r} at character {self._at} closes nothing")
        return choices

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("it ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _choices(self) -> tuple[tuple[_Item, ...], ...]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PatternError(f"its groups are nested more than {MAX_DEPTH} levels")
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        self._depth -= 1
        return tuple(choices)

    def _sequence(self) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            item = self._atom()
            least, most = self._quantifier()
            if (least, most) != (1, 1):
                if not isinstance(item, Regex):
                    raise PatternError("a lookahead within a repetition cannot be kept")
                item = rx.repeat(item, least, most)
            if not (items and items[-1] is item and item in (_BEGIN, _END)):
                items.append(item)
        return tuple(items)

    def _quantifier(self) -> tuple[int, int | None]:
        least, most = 1, 1
        found: tuple[int, int | None] = (least, most)
        if self._take("*"):
            found = 0, None
        elif self._take("+"):
            found = 1, None
        elif self._take("?"):
            found = 0, 1
        elif self._text.startswith("{", self._at):
            found = self._counted()
        else:
            return found
        self._take("?")  # lazy repetitions match the same texts
        return found

    def _counted(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._at)
        first, comma, second = self._text[self._at + 1 : end].partition(",")
        if end < 0 or not first.isdecimal() or (second and not second.isdecimal()):
            raise PatternError(f"'{{' at character {self._at} begins no repetition; allowed: {{2}}, {{2,}} or {{2,4}}")
        least = int(first)
        most = least if not comma else int(second) if second else None
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise PatternError(f"a repetition of {first}{comma}{second}; allowed: at most {MAX_REPEATS}, in order")
        self._at = end + 1
        return least, most

    def _atom(self) -> _Item:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return rx.chars(self._class())
        if char == ".":
            return rx.chars(rx.without(rx.TEXT, LINE_ENDS))
        if char == "^":
            return _BEGIN
        if char == "$":
            return _END
        if char == "\\":
            return rx.chars(self._escape(in_class=False))
        if char in "*+?":
            raise PatternError(f"{char!r} at character {self._at - 1} repeats nothing")
        return _of(ord(char))

    def _group(self) -> _Item:
        kind = next((mark for mark in ("?:", "?=", "?!", "?<=", "?<!", "?<", "?P<") if self._take(mark)), "")
        if kind in ("?<=", "?<!"):
            raise PatternError("lookbehind cannot be kept")
        if kind in ("?<", "?P<"):
            end = self._text.find(">", self._at)
            if end < 0:
                raise PatternError("the name of a group does not end")
            self._at = end + 1
        elif not kind and self._text.startswith("?", self._at):
            raise PatternError(f"(?{self._text[self._at + 1 : self._at + 2]} cannot be kept")
        choices = self._choices()
        if not self._take(")"):
            raise PatternError("a group does not end")
        if kind in ("?=", "?!"):
            return _Look(_joined(choices, rx.EMPTY), kind == "?=")
        if all(isinstance(item, Regex) for choice in choices for item in choice):
            return _joined(choices, rx.EMPTY)
        return _Group(choices)

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member()
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = self._member()
                if not (_is_one(low) and _is_one(high)) or low[0][0] > high[0][0]:
                    raise PatternError(f"a range before character {self._at} has no order")
                found.append((low[0][0], high[0][0]))
            else:
                found.extend(low)
        ranges = rx.merged(found)
        return rx.without(rx.TEXT, ranges) if negated else rx.intersect(ranges, rx.TEXT)

    def _member(self) -> Ranges:
        char = self._next()
        return self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, in_class: bool) -> Ranges:
        char = self._next()
        if char in "dDwWsS":
            return _named(char)
        if char in "pP" and self._take("{"):
            end = self._text.find("}", self._at)
            name, self._at = self._text[self._at : max(end, self._at)], end + 1
            return _category(name) if char == "p" else rx.without(rx.TEXT, _category(name))
        if char == "b" and in_class:
            return ((8, 8),)
        if char in _LETTERS:
            return ((_LETTERS[char], _LETTERS[char]),)
        if char in "xu":
            code = self._hex(char)
            return ((code, code),)
        if char == "c" and self._at < len(self._text) and self._text[self._at].isalpha():
            code = ord(self._next()) % 32
            return ((code, code),)
        if char.isalnum():
            what = {"b": "a word boundary", "B": "a word boundary"}.get(char, "it")
            raise PatternError(f"\\{char}: {what} cannot be kept")
        return ((ord(char), ord(char)),)

    def _hex(self, kind: str) -> int:
        if kind == "u" and self._take("{"):
            end = self._text.find("}", self._at)
        else:
            end = self._at + (2 if kind == "x" else 4)
        digits = self._text[self._at : max(end, self._at)]
        try:
            code = int(digits, 16)
        except ValueError:
            raise PatternError(f"\\{kind}{digits}: no hexadecimal number") from None
        self._at = end + self._text.startswith("}", end)
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):
            code = 0x10000 + ((code - 0xD800) << 10) + (self._hex("u") - 0xDC00)
        if code > rx.MAX_CHAR:
            raise PatternError(f"\\{kind}{digits}: no character")
        return code


def _of(code: int) -> Regex:
    return rx.chars(((code, code),))


_BEGIN, _END = _of(rx.BEGIN), _of(rx.END)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


@cache
def _named(letter: str) -> Ranges:
    """The characters of \\d, \\w, \\s and their complements."""
    narrow = {"d": DIGITS, "w": WORD, "s": SPACES}
    if letter in narrow:
        return narrow[letter]
    if letter == "S":
        return rx.without(rx.TEXT, WIDE_SPACES)
    taken = [(code, code) for code in range(128, rx.MAX_CHAR + 1) if _is_word(chr(code), letter)]
    return rx.without(rx.TEXT, rx.merged([*narrow[letter.lower()], *taken]))


def _is_word(char: str, letter: str) -> bool:
    return char.isdecimal() if letter == "D" else char.isalnum()


@cache
def _category(name: str) -> Ranges:
    """Characters of a Unicode general category."""
    short = _CATEGORIES.get(name.removeprefix("General_Category=").removeprefix("gc="), name)
    found = [(code, code) for code in range(rx.MAX_CHAR + 1) if unicodedata.category(chr(code)).startswith(short)]
    if not short or not found:
        raise PatternError(f"\\p{{{name}}} is not known; allowed: general categories, such as \\p{{L}} or \\p{{Lu}}")
    return rx.intersect(rx.merged(found), rx.TEXT)
