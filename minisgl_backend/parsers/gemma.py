"""Tool calls of Gemma 4: `<|tool_call>call:NAME{key:VALUE,...}<tool_call|>`.

Strings are enclosed in `<|"|>`, which they cannot escape; otherwise the syntax is JSON's, with unquoted keys. Models
also write JSON's quotes, or Python's. A text may quote the tags of a call, so that only the whole answer tells where
one ends: calls are told at its end.
"""

from __future__ import annotations

import json
import re
from typing import Any

from minisgl_backend.parsers.argument_types import as_json
from minisgl_backend.parsers.headers import MAX_HEADER, MORE, NONE, Header, Named, skip_space
from minisgl_backend.parsers.json_reader import word_as_json
from minisgl_backend.parsers.parts import STOP, STOP_TEXT, Part, content
from minisgl_backend.parsers.tagged import Outcome, TaggedParser

_BEGIN, _END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PYTHON_TEXT = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
_KEY = re.compile(r"\s*([^\s:,{}\[\]<>\"']+)\s*:")
_WORD = re.compile(r"[\w+\-.]+")
_HEADER = Header(("call:",))
_OTHER = re.compile(r"\s*call:[^{}\n<]{1,256}(?=\{)")
_OTHER_BEGUN = re.compile(r"\s*(c|ca|cal|call|call:[^{}\n<]{0,256})?")
_MAX_DEPTH = 64


class Gemma4Parser(TaggedParser):
    BEGIN = (_BEGIN,)

    def begin(self, tag: str) -> None:
        self._texts: list[str] = []  # all since the header of the first call

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        if not self._texts:
            header = self._header(text, is_last=is_last)
            if header == MORE:
                return text, "more"
            if header == NONE:
                return text, "none"
        self._texts.append(text)
        if not is_last:
            return "", "more"
        text = "".join(self._texts)
        try:
            return "", self._read_all(text, parts)
        except ValueError:
            parts += content(self.opening + text)
            return "", "damaged"

    def _header(self, text: str, *, is_last: bool) -> Named | int:
        """The header of a call, with an empty name if the function was not offered."""
        text = text[:MAX_HEADER]
        is_last = is_last or len(text) == MAX_HEADER
        found = self.names.find(text, _HEADER, is_last=is_last)
        if isinstance(found, Named):
            start = skip_space(text, found.end)
            if text.startswith("{", start):
                return Named(found.name, found.start, start)
            return NONE if is_last or start < len(text) else MORE
        if found == NONE and (other := _OTHER.match(text)) is not None:
            return Named("", other.start(), other.end())
        if found == NONE and not is_last and _OTHER_BEGUN.fullmatch(text):
            return MORE
        return found

    def _read_all(self, text: str, parts: list[Part]) -> Outcome:
        """Adds the calls, and the text between them. Raises ValueError if tags are left that belong to no call."""
        outcome: Outcome = "damaged"
        found: list[Part] = []
        first, opening, position = self.count, self.opening, 0
        while position < len(text):
            header = self._header(text[position : position + MAX_HEADER], is_last=True)
            if not isinstance(header, Named):
                raise ValueError("no call")
            try:
                value, end = _value(text, position + header.end, 0)
            except ValueError:
                # The rest of the answer is what is left of a damaged call.
                found += content(opening + text[position:])
                break
            end = skip_space(text, end)
            has_end = text.startswith(_END, end)
            if not has_end and (end < len(text) or self.reason != STOP):
                found += content(opening + text[position:])
                break
            end += len(_END) * has_end
            following = self._following(text, end)
            between = text[end:following] if following >= 0 else text[end:]
            if _QUOTE in between or _END in between:
                self.count = first
                raise ValueError("the end of this call was quoted")
            if following < 0 and self.reason not in (STOP, STOP_TEXT):
                found += content(opening + text[position:])
                break
            if header.name:
                self.emit_call(header.name, found, as_json(value))
            else:
                found += content(opening + text[position:end])
            found += content(between.rstrip())
            if following < 0:
                outcome = "read"
                break
            opening = between[len(between.rstrip()) :] + _BEGIN
            position = following + len(_BEGIN)
        parts += found
        return outcome

    def _following(self, text: str, position: int) -> int:
        """Where the tag of the next call stands; negative: nowhere."""
        while (position := text.find(_BEGIN, position)) >= 0:
            if isinstance(
                self._header(text[(begin := position + len(_BEGIN)) : begin + MAX_HEADER], is_last=True), Named
            ):
                break
            position += len(_BEGIN)
        return position


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """The value at `position`, and its end. Raises ValueError if there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if text.startswith((_QUOTE, '"', "'"), position):
        return _text(text, position)
    if text.startswith("{", position):
        return _object(text, position, depth)
    if text.startswith("[", position):
        return _list(text, position, depth)
    word = _WORD.match(text, position)
    plain = None if word is None else word_as_json(word[0])
    if word is None or plain is None:
        raise ValueError("no value")
    return json.loads(plain), word.end()


def _text(text: str, position: int) -> tuple[str, int]:
    if text.startswith(_QUOTE, position):
        begin = position + len(_QUOTE)
        end = text.index(_QUOTE, begin)
        return text[begin:end], end + len(_QUOTE)
    if (found := _JSON_TEXT.match(text, position)) is not None:
        return json.loads(found[0], strict=False), found.end()
    if (found := _PYTHON_TEXT.match(text, position)) is not None:
        return json.loads('"' + re.sub(r"\\.|\"", _escape, found[1], flags=re.DOTALL) + '"', strict=False), found.end()
    raise ValueError("no end of a text")


def _escape(found: re.Match[str]) -> str:
    """An escape in single quotes as JSON has it."""
    return {"\\'": "'", '"': '\\"'}.get(found[0], found[0])


def _object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    while not text.startswith("}", position):
        if text.startswith((_QUOTE, '"', "'"), position):
            key, position = _text(text, position)
            position = skip_space(text, position)
            if not text.startswith(":", position):
                raise ValueError("no key")
            position += 1
        elif (named := _KEY.match(text, position)) is not None:
            key, position = named[1], named.end()
        else:
            raise ValueError("no key")
        if key in found:
            raise ValueError("a key twice")
        found[key], position = _value(text, skip_space(text, position), depth + 1)
        position = _comma(text, position, "}")
    return found, position + 1


def _list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    position = skip_space(text, position + 1)
    while not text.startswith("]", position):
        value, position = _value(text, position, depth + 1)
        found.append(value)
        position = _comma(text, position, "]")
    return found, position + 1


def _comma(text: str, position: int, end: str) -> int:
    position = skip_space(text, position)
    if text.startswith(",", position):
        return skip_space(text, position + 1)
    if not text.startswith(end, position):
        raise ValueError("no comma")
    return position
