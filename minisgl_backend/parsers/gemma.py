"""Tool calls of Gemma 4: `<|tool_call>call:NAME{key:VALUE,...}<tool_call|>`.

Strings are enclosed in `<|"|>`; otherwise the syntax is JSON's, with unquoted keys.
"""

from __future__ import annotations

import json
import re
from typing import Any

from minisgl_backend.parsers.argument_types import as_json
from minisgl_backend.parsers.parts import Part, partial_suffix
from minisgl_backend.parsers.tagged import Outcome, TaggedParser

_END, _QUOTE = "<tool_call|>", '<|"|>'
_CALL = re.compile(r"\s*call:(?P<name>[\w.\-]+)\s*(?P<object>\{.*)", re.DOTALL)
_KEY = re.compile(r"\s*([^\s:,{}\[\]<>\"]+)\s*:")
_WORD = re.compile(r"\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)\s*")
_MAX_DEPTH = 64


class Gemma4Parser(TaggedParser):
    BEGIN = ("<|tool_call>",)

    def read(self, text: str, parts: list[Part], *, is_last: bool) -> tuple[str, Outcome]:
        body, found, rest = text.partition(_END)
        if not found and not is_last:
            return text, "more"
        if not found:
            body = body[: len(body) - partial_suffix(body, _END)]
        call = _CALL.fullmatch(body)
        if call is None:
            return text, "none"
        try:
            value, end = _value(call["object"], 0, 0)
        except ValueError:
            return text, "none"
        if call["object"][end:].strip():
            return text, "none"
        self.emit_call(call["name"], parts, as_json(value))
        return rest, "emitted"


def _value(text: str, position: int, depth: int) -> tuple[Any, int]:
    """The value at `position`, and its end. Raises ValueError if there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if text.startswith(_QUOTE, position):
        return _text(text, position)
    if text.startswith("{", position):
        return _object(text, position, depth)
    if text.startswith("[", position):
        return _list(text, position, depth)
    word = _WORD.match(text, position)
    if word is None:
        raise ValueError("no value")
    return json.loads(word[1]), word.end()


def _text(text: str, position: int) -> tuple[str, int]:
    begin = position + len(_QUOTE)
    end = text.index(_QUOTE, begin)
    return text[begin:end], end + len(_QUOTE)


def _object(text: str, position: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    position = _skip(text, position + 1)
    while not text.startswith("}", position):
        if text.startswith(_QUOTE, position):
            key, position = _text(text, position)
            if not text.startswith(":", position):
                raise ValueError("no key")
            position += 1
        elif (named := _KEY.match(text, position)) is not None:
            key, position = named[1], named.end()
        else:
            raise ValueError("no key")
        if key in found:
            raise ValueError("a key twice")
        found[key], position = _value(text, _skip(text, position), depth + 1)
        position = _comma(text, position, "}")
    return found, position + 1


def _list(text: str, position: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    position = _skip(text, position + 1)
    while not text.startswith("]", position):
        value, position = _value(text, position, depth + 1)
        found.append(value)
        position = _comma(text, position, "]")
    return found, position + 1


def _comma(text: str, position: int, end: str) -> int:
    position = _skip(text, position)
    if text.startswith(",", position):
        return _skip(text, position + 1)
    if not text.startswith(end, position):
        raise ValueError("no comma")
    return position


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
