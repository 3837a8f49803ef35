"""Tool calls of Qwen3-Coder: tags instead of JSON.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Only the function's schema says whether a value is a string or JSON. Strings are streamed, other values are told whole.
If an answer ends by itself within a call, the call is closed.

Models forget tags. A value without its closing tag ends before a line that begins another parameter of the function, or
at the end of the call, unless a call begins within it; a parameter with an invalid name is left out.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.headers import MORE, Header
from minisgl_backend.parsers.tag_values import TagValuesParser
from minisgl_backend.parsers.tagged import Outcome

_CALL, _FUNCTION = "<tool_call>", "<function="


class QwenCoderParser(TagValuesParser):
    BEGIN = (_CALL, _FUNCTION)
    HEADER = Header((), (">",))
    OPEN = "<parameter="
    KEY = re.compile(r"<parameter=(?P<key>[^<>\n]+)>")
    KEY_STEPS = (OPEN, re.compile(r"[^<>\n]+"), ">")
    CLOSE = "</parameter>"
    ENDS = ("</function>", "</tool_call>")
    BEHIND = "</tool_call>"
    TAGS = ("\n" + CLOSE, CLOSE, "\n" + OPEN, OPEN, "\n</function>", "\n</tool_call>", *BEGIN)
    HAS_LINES = True
    STREAMS = True

    def header_of(self, tag: str) -> Header:
        return Header((_FUNCTION,), (">",)) if tag == _CALL else self.HEADER

    def _odd_text(self, start: int, is_last: bool) -> Outcome | None:
        if not is_last and self._may_begin(start, self.BEGIN):
            return "more"
        self._take(start)
        if self._text.startswith(self.BEGIN, start):
            return self._damage()
        after = self._text.find("<", start + 1)
        self._take(after if after > 0 else len(self._text))
        return None

    def _may_end_alone(self) -> bool:
        return not (self._value.depth or self._value.num_ends or self._value.quotes)

    def _other_tag(self, found: re.Match[str], is_last: bool) -> Outcome | None:
        tag = found[0].strip()
        if tag in self.BEGIN:
            self._value.open_call()
            self._take_value(found.end())
            return None
        is_inside = self._value.depth or self._value.quotes or tag == found[0]
        if tag != self.OPEN:
            if is_inside:
                self._take_value(found.end())
                return None
            self._end_call(found.end(), found[0], is_odd=True)
            return None
        key = MORE if is_inside else self._key_at(found.start() + 1, is_last)
        if not is_inside and key == MORE:
            return "more"
        if isinstance(key, int) or key["key"] in self._keys or not self._types.may_have(key["key"]):
            return super()._other_tag(found, is_last)
        self._take(found.start() + 1)
        self._close_value()
        return None
