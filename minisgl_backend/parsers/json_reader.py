"""One JSON value in a text that arrives in pieces -> valid JSON, as it arrives."""

from __future__ import annotations

import json
import math
import re
from typing import Literal

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[\w+\-.]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")  # which Python's JSON has
_MAX_DEPTH = 200


def word_as_json(word: str) -> str | None:
    """A number or a word as JSON: numbers that JSON lacks as strings, as no other type can hold them; None: neither."""
    if word in _WORDS:
        return _WORDS[word]
    if word in _NO_NUMBERS or (_NUMBER.fullmatch(word) and not word.isdigit() and not math.isfinite(float(word))):
        return f'"{word}"'
    return word if _NUMBER.fullmatch(word) else None


class JsonReader:
    """Reads one value, and finds its end: tags within its strings are text.

    What models get wrong without changing the meaning is put right: line breaks within strings, backslashes that
    escape nothing, a comma before a bracket, Python's names of constants. Anything else is broken.
    """

    def __init__(self) -> None:
        self.state: Literal["open", "done", "broken"] = "open"
        self._stack: list[str] = []  # open brackets
        self._expects: Literal["value", "first value", "key", "first key", "colon", "comma"] = "value"
        self._in_string = False
        self._escape = ""  # an escape that is not complete
        self._word = ""  # a number or a word that may go on
        self._comma = ""  # a comma, and white space behind it, until something follows

    def feed(self, text: str, position: int = 0) -> tuple[int, str]:
        """(where the text behind the value begins, or its end; the JSON of what was read). Of a broken value, the
        position is that of the first wrong character."""
        told: list[str] = []
        while position < len(text) and self.state == "open":
            position = (self._string if self._in_string else self._outside)(text, position, told)
        return position, "".join(told)

    def _string(self, text: str, position: int, told: list[str]) -> int:
        if self._escape:
            return self._escaped(text[position], position, told)
        if (run := _PLAIN.match(text, position)) is not None:
            told.append(run[0])
            return run.end()
        if text[position] == "\\":
            self._escape = "\\"
        elif text[position] == '"':
            told.append('"')
            self._in_string = False
            if self._expects in ("key", "first key"):
                self._expects = "colon"
            else:
                self._end_value()
        else:  # a control character, which JSON only has as an escape
            told.append(json.dumps(text[position])[1:-1])
        return position + 1

    def _escaped(self, char: str, position: int, told: list[str]) -> int:
        begun = self._escape
        if begun == "\\" and char == "u":
            self._escape = "\\u"
        elif begun != "\\" and char in "0123456789abcdefABCDEF":
            self._escape = begun + char if len(begun) < 5 else ""
            if not self._escape:
                told.append(begun + char)
        elif begun == "\\" and char in '"\\/bfnrt':
            self._escape = ""
            told.append(begun + char)
        elif char < " ":
            self.state = "broken"
            return position
        else:  # no escape of JSON
            self._escape = ""
            told.append("'" if begun + char == "\\'" else "\\" + begun)
            return position + (begun + char == "\\'")
        return position + 1

    def _outside(self, text: str, position: int, told: list[str]) -> int:
        if (run := _WORD.match(text, position)) is not None and (self._word or "value" in self._expects):
            self._word += run[0]
            return run.end()
        if self._word:
            self._end_word(told)
            return position
        if (run := _SPACES.match(text, position)) is not None:
            if self._comma:
                self._comma += run[0]
            else:
                told.append(run[0])
            return run.end()
        return self._sign(text[position], position, told)

    def _sign(self, char: str, position: int, told: list[str]) -> int:
        expects = self._expects
        if char == "," and expects == "comma" and self._stack:
            self._comma, self._expects = ",", "key" if self._stack[-1] == "{" else "value"
        elif char in "}]" and self._may_close(char):
            self._comma = ""
            self._stack.pop()
            told.append(char)
            self._end_value()
        elif char == ":" and expects == "colon":
            told.append(char)
            self._expects = "value"
        elif char == '"' and ("value" in expects or "key" in expects):
            self._flush(char, told)
            self._in_string = True
        elif char in "{[" and "value" in expects and len(self._stack) < _MAX_DEPTH:
            self._flush(char, told)
            self._stack.append(char)
            self._expects = "first key" if char == "{" else "first value"
        else:
            self.state = "broken"
            return position
        return position + 1

    def _may_close(self, char: str) -> bool:
        kind = "key" if char == "}" else "value"
        fits = self._expects in ("comma", f"first {kind}") or (self._expects == kind and bool(self._comma))
        return fits and bool(self._stack) and self._stack[-1] + char in ("{}", "[]")

    def _end_word(self, told: list[str]) -> None:
        word = word_as_json(self._word)
        if word is None:
            self.state = "broken"
            return
        self._flush(word, told)
        self._word = ""
        self._end_value()

    def _flush(self, text: str, told: list[str]) -> None:
        told.append(self._comma + text)
        self._comma = ""

    def _end_value(self) -> None:
        self._expects = "comma"
        if not self._stack:
            self.state = "done"


def object_as_json(text: str) -> str | None:
    """A whole object as valid JSON; None if the text is anything else."""
    reader = JsonReader()
    end, told = reader.feed(text.strip(SPACE))
    whole = reader.state == "done" and end == len(text.strip(SPACE)) and told.startswith("{")
    return told if whole else None
