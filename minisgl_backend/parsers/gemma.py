"""Tool calls of Gemma 4: `<|tool_call>call:NAME{key:VALUE,...}<tool_call|>`.

Texts stand between `<|"|>`; lists, objects, numbers, true, false and null are JSON's but for their texts and keys.
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
        self.tell(call["name"], parts, as_json(value))
        return rest, "told"


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    """The value at `place`, and where it ends. Raises ValueError where there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if text.startswith(_QUOTE, place):
        return _text(text, place)
    if text.startswith("{", place):
        return _object(text, place, depth)
    if text.startswith("[", place):
        return _list(text, place, depth)
    word = _WORD.match(text, place)
    if word is None:
        raise ValueError("no value")
    return json.loads(word[1]), word.end()


def _text(text: str, place: int) -> tuple[str, int]:
    begin = place + len(_QUOTE)
    end = text.index(_QUOTE, begin)
    return text[begin:end], end + len(_QUOTE)


def _object(text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    place = _skip(text, place + 1)
    while not text.startswith("}", place):
        if text.startswith(_QUOTE, place):
            key, place = _text(text, place)
            if not text.startswith(":", place):
                raise ValueError("no key")
            place += 1
        elif (named := _KEY.match(text, place)) is not None:
            key, place = named[1], named.end()
        else:
            raise ValueError("no key")
        if key in found:
            raise ValueError("a key twice")
        found[key], place = _value(text, _skip(text, place), depth + 1)
        place = _comma(text, place, "}")
    return found, place + 1


def _list(text: str, place: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    place = _skip(text, place + 1)
    while not text.startswith("]", place):
        value, place = _value(text, place, depth + 1)
        found.append(value)
        place = _comma(text, place, "]")
    return found, place + 1


def _comma(text: str, place: int, end: str) -> int:
    place = _skip(text, place)
    if text.startswith(",", place):
        return _skip(text, place + 1)
    if not text.startswith(end, place):
        raise ValueError("no comma")
    return place


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
