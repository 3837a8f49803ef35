"""Tool calls of Qwen3-Coder: tags instead of JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Only the function's schema says whether a value is a string or JSON. Strings are streamed, other values are emitted
whole. If an answer ends by itself within a call, the call is closed; if it was cut off, so are the arguments.


Models forget tags. A value without its closing tag ends before a line that begins another parameter of the function, or
at the end of the call; a parameter with an invalid name is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from minisgl_backend.parsers.argument_types import ArgumentTypes, as_json, converted
from minisgl_backend.parsers.parts import Part, may_be_function, partial_suffix

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SPACE = " \t\r\n"
_KEY = re.compile(r"[^<>\n]*")
# What may end a value: both closing tags of a call in a row; one of them alone only if nothing else follows.
_END = re.compile(
    r"\n?</parameter>|\n<parameter=(?P<key>[^<>\n]+)>|\n</function>\s*</tool_call>|(?P<one>\n</(?:function|tool_call)>)"
)
_BEGINS_OF_END = (_PARAMETER_END, *("\n" + tag for tag in (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)))
_KEY_BEGUN = re.compile(r"\n<parameter=[^<>\n]*\Z")
_NEXT = (_OPEN, _FUNCTION, _CLOSE)


class QwenCoderParser:
    """One choice of one answer. The parts do not depend on how the text is split into pieces."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        """`functions`: name -> JSON schema of the arguments."""
        self._functions = functions
        self._state: Literal["text", "opened", "function", "value", "closing"] = "text"
        self._held = ""
        self._opening = ""  # the text before a call, in case it turns out not to be one
        self._num_calls = 0
        self._arguments = ArgumentTypes({})  # of the call's function
        self._keys: set[str] = set()  # parameters of the call that have a value
        self._key = ""  # parameter of the value being read
        self._types: frozenset[str] | None = None  # types of the value being read; None: any
        self._streams = False  # the value is certainly a string
        self._begun = False  # the value's first line break has passed

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
        """What was held back. A call that was never emitted is content."""
        parts: list[Part] = []
        if self._state == "text":
            self._content(self._held.rstrip() if self._num_calls else self._held, parts)
        elif self._state == "opened":
            self._content(self._opening + self._held, parts)
        elif reason == "stop" and self._state != "closing":
            if self._state == "value":
                self._value(parts, is_last=True)
            self._argument("}", parts)
            self._num_calls += 1
            self._state = "text"
        self._held = ""
        return parts

    def _text(self, parts: list[Part]) -> bool:
        starts = [position for position in (self._held.find(_OPEN), self._held.find(_FUNCTION)) if position >= 0]
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
        # Without the tag before it, it may be prose about a function that was not offered.
        may_be_called = self._opening.endswith(_OPEN) or not found or name in self._functions
        if rest.startswith(_FUNCTION) and not found and not set(name) & set("<\n"):
            return False
        if rest.startswith(_FUNCTION) and may_be_function(name, self._functions) and may_be_called:
            self._arguments = ArgumentTypes(self._functions.get(name, {}))
            parts += [Part("call", name, self._num_calls), Part("arguments", "{", self._num_calls)]
            self._held, self._keys, self._state = behind, set(), "function"
            return True
        # Not a call: its beginning is content, at least the first character.
        end = 0 if self._opening.endswith(_OPEN) else 1
        self._content(self._opening + self._held[:end], parts)
        self._held, self._state = self._held[end:], "text"
        return True

    def _function(self, parts: list[Part]) -> bool:
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(_PARAMETER):
            key = _KEY.match(rest, len(_PARAMETER))
            if key is None or key.end() == len(rest):
                return False
            if not key[0] or rest[key.end()] != ">":  # an invalid name: the parameter is left out
                self._held = rest[key.end() :]
                return True
            self._argument((", " if self._keys else "") + as_json(key[0]) + ": ", parts)
            self._keys.add(key[0])
            self._types = self._arguments.of(key[0])
            self._streams = self._types == {"string"} and not self._arguments.has_choices(key[0])
            self._key, self._begun = key[0], False
            self._held, self._state = rest[key.end() + 1 :], "value"
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
        after = rest.find("<", 1)
        self._held = rest[after:] if after > 0 else ""  # text that cannot be part of a call
        return True

    def _value(self, parts: list[Part], *, is_last: bool = False) -> bool:
        """`is_last`: nothing follows."""
        end, behind = self._find_end(is_last=is_last)
        if behind is not None:
            text = self._held[:end]
            self._held, self._state = self._held[behind:], "function"
        elif is_last or self._streams:
            text, self._held = self._held[:end], self._held[end:]
        else:
            return False
        if not self._streams:
            value = self._arguments.chosen(self._key, text.removeprefix("\n"))
            self._argument(converted(value, self._types), parts)
            return True
        if text and not self._begun:
            text = text.removeprefix("\n")
            self._argument('"', parts)
            self._begun = True
        self._argument(as_json(text)[1:-1], parts)
        if behind is None and not is_last:
            return False
        self._argument('"' if self._begun else '""', parts)
        return True

    def _find_end(self, *, is_last: bool) -> tuple[int, int | None]:
        """The end of the value's text and the start of what follows; or the end of the text that is certain, and
        None."""
        for found in _END.finditer(self._held):
            start = found.start()
            if found["key"] is not None:
                if found["key"] not in self._keys and self._arguments.may_have(found["key"]):
                    return start, start + 1
            elif found["one"] is None:
                return start, start + 1 if _FUNCTION_END in found[0] else found.end()
            else:
                rest = self._held[found.end() :].lstrip(_SPACE)
                if (is_last and not rest) or any(rest.startswith(tag) for tag in _NEXT):
                    return start, start + 1
                if not is_last and any(tag.startswith(rest) for tag in _NEXT):
                    return start, None
        keep = max(partial_suffix(self._held, tag) for tag in _BEGINS_OF_END)
        if (begun := _KEY_BEGUN.search(self._held)) is not None:
            keep = max(keep, len(self._held) - begun.start())
        return len(self._held) - keep, None

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
