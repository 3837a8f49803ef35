"""Tool calls of Qwen3-Coder: tags in place of JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

What a value is, a text or JSON, only the function's schema says. Texts are streamed, everything else is told whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.openai.parts import Part
from minisgl_backend.openai.reasoning import partial_suffix

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SPACE = " \t\r\n"
_PYTHON = {"True": True, "False": False, "None": None}  # as models write them now and then


class QwenCoderParser:
    """One choice of one answer. The same whatever places the text is cut at."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        self._functions = functions
        self._state: Literal["text", "opened", "function", "value", "closing"] = "text"
        self._held = ""
        self._opening = ""  # what a call that turns out to be none began with
        self._num_calls = 0
        self._schema: Mapping[str, Any] = {}  # of the function's parameters
        self._num_values = 0  # of the call
        self._types: set[str] = set()  # of the value that is being read
        self._streams = False  # the value is a text and nothing else
        self._begun = False  # the value's first line break is behind

    def feed(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        step = {
            "text": self._text,
            "opened": self._opened,
            "function": self._function,
            "value": self._value,
            "closing": self._closing,
        }
        while step[self._state](parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back. A call that was never told is content."""
        text = ""
        if self._state == "text":
            text = self._held.rstrip() if self._num_calls else self._held
        elif self._state == "opened":
            text = self._opening + self._held
        self._held = ""
        return [Part("content", text)] if text else []

    def _text(self, parts: list[Part]) -> bool:
        starts = [place for place in (self._held.find(_OPEN), self._held.find(_FUNCTION)) if place >= 0]
        if starts:
            start = min(starts)
            before = self._held[:start].rstrip()
            self._content(before, parts)
            end = start + len(_OPEN) if self._held.startswith(_OPEN, start) else start
            self._opening, self._held = self._held[len(before) : end], self._held[end:]
            self._state = "opened"
            return True
        keep = max(partial_suffix(self._held, tag) for tag in (_OPEN, _FUNCTION))
        # White space is kept until it is known whether a call follows.
        safe = self._held[: len(self._held) - keep].rstrip()
        self._content(safe, parts)
        self._held = self._held[len(safe) :]
        return False

    def _opened(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(_SPACE)
        if _FUNCTION.startswith(rest):
            return False
        name, found, behind = rest.removeprefix(_FUNCTION).partition(">")
        if rest.startswith(_FUNCTION) and name and not set(name) & set("<\n"):
            if not found:
                return False
            self._schema = self._functions.get(name, {}).get("properties") or {}
            parts += [Part("call", name, self._num_calls), Part("arguments", "{", self._num_calls)]
            self._held, self._num_values, self._state = behind, 0, "function"
            return True
        # Something else: what it began with is content, at least its first character.
        end = 0 if self._opening.endswith(_OPEN) else 1
        self._content(self._opening + self._held[:end], parts)
        self._held, self._state = self._held[end:], "text"
        return True

    def _function(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(_PARAMETER):
            key, found, behind = rest.removeprefix(_PARAMETER).partition(">")
            if not found:
                return False
            self._argument((", " if self._num_values else "") + _json(key) + ": ", parts)
            self._num_values += 1
            schema = self._schema.get(key)
            self._types = _types(schema)
            self._streams, self._begun = self._types == {"string"}, False
            self._held, self._state = behind, "value"
            return True
        for tag in (_FUNCTION_END, _CLOSE):
            if rest.startswith(tag):
                self._argument("}", parts)
                self._num_calls += 1
                self._held = rest.removeprefix(_FUNCTION_END)
                self._state = "closing"
                return True
        if any(tag.startswith(rest) for tag in (_PARAMETER, _FUNCTION_END, _CLOSE)):
            return False
        self._held = rest[1:]  # nothing that a call may hold
        return True

    def _value(self, parts: list[Part]) -> bool:
        if not self._streams:
            text, found, behind = self._held.partition(_PARAMETER_END)
            if not found:
                return False
            self._argument(_json(_converted(text.removeprefix("\n").removesuffix("\n"), self._types)), parts)
            self._held, self._state = behind, "function"
            return True
        if not self._begun:
            if not self._held:
                return False
            self._held, self._begun = self._held.removeprefix("\n"), True
            self._argument('"', parts)
        text, found, behind = self._held.partition(_PARAMETER_END)
        if found:
            self._argument(_json(text.removesuffix("\n"))[1:], parts)
            self._held, self._state = behind, "function"
            return True
        safe = text[: len(text) - partial_suffix(text, "\n" + _PARAMETER_END)]
        safe = safe[: len(safe) - partial_suffix(safe, _PARAMETER_END)]
        self._argument(_json(safe)[1:-1], parts)
        self._held = text[len(safe) :]
        return False

    def _closing(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(_SPACE)
        if _CLOSE.startswith(rest) and rest != _CLOSE:
            return False
        if rest.startswith(_CLOSE):
            self._held = rest.removeprefix(_CLOSE)
        self._state = "text"
        return True

    def _content(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Part("content", text))

    def _argument(self, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Part("arguments", text, self._num_calls))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; a text where it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    given = schema.get("type")
    found = {given} if isinstance(given, str) else {one for one in given or () if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or ():
            found |= _types(one)
    return found or {"string"}


def _converted(text: str, types: set[str]) -> Any:
    """A value that need not be a text; a text where it cannot be anything else."""
    if "string" in types:
        return None if text.strip() == "null" else text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _PYTHON.get(text.strip(), text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
