"""Tool calls of Qwen3-Coder: tags in place of JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

What a value is, a text or JSON, only the function's schema says. Texts are streamed, everything else is told whole.
An answer that ends by itself before its call does leaves a call that is closed for it; one that is cut off leaves
arguments that are cut off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.parsers.argument_types import ArgumentTypes
from minisgl_backend.parsers.parts import Part, without_surrogates
from minisgl_backend.parsers.reasoning import partial_suffix

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
        self._arguments = ArgumentTypes({})  # of the call's function
        self._num_values = 0  # of the call
        self._types: frozenset[str] | None = None  # of the value that is being read; None: of any
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

    def finish(self, reason: str) -> list[Part]:
        """What was held back. A call that was never told is content."""
        parts: list[Part] = []
        if self._state == "text":
            self._content(self._held.rstrip() if self._num_calls else self._held, parts)
        elif self._state == "opened":
            self._content(self._opening + self._held, parts)
        elif reason == "stop" and self._state != "closing":
            if self._state == "value":
                self._end_value(parts)
            self._argument("}", parts)
            self._num_calls += 1
            self._state = "text"
        self._held = ""
        return parts

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
        # Without the tag before it, it may be prose about a function that nobody offered.
        may_be_called = self._opening.endswith(_OPEN) or not found or name in self._functions
        if rest.startswith(_FUNCTION) and name and not set(name) & set("<\n") and may_be_called:
            if not found:
                return False
            self._arguments = ArgumentTypes(self._functions.get(name, {}))
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
            self._types = self._arguments.of(key)
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
            self._argument(_converted(text.removeprefix("\n").removesuffix("\n"), self._types), parts)
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

    def _end_value(self, parts: list[Part]) -> None:
        """Ends a value whose closing tag is missing, or has only begun."""
        text = self._held
        text = text[: len(text) - max(partial_suffix(text, tag) for tag in (_PARAMETER_END, "\n" + _PARAMETER_END))]
        if not self._streams:
            for tag in (_CLOSE, _FUNCTION_END):
                if text.rstrip(_SPACE).endswith(tag):
                    text = text.rstrip(_SPACE).removesuffix(tag)
            self._argument(_converted(text.removeprefix("\n").removesuffix("\n"), self._types), parts)
            return
        if not self._begun:
            self._argument('"', parts)
        self._argument(_json(text)[1:], parts)

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
    return without_surrogates(json.dumps(value, ensure_ascii=False))


def _converted(text: str, types: frozenset[str] | None) -> str:
    """A value as JSON; a text where it may be one, and where it is nothing else.

    `types`: the JSON types that it may have; None: any, then it is a text where it is no JSON.
    """
    if types is not None and "string" in types:
        return "null" if text.strip() == "null" else _json(text)
    try:
        return _json(json.loads(text, parse_constant=_finite, parse_float=_finite))
    except (ValueError, RecursionError):
        return _json(_PYTHON.get(text.strip(), text))


def _finite(text: str) -> float:
    """JSON has no other numbers."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON")
    return value
