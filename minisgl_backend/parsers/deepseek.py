"""Tool calls of DeepSeek V3 and R1, of V3.1, and of V3.2 and V4.

V3, R1, R1-0528 and R1's distillations:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2 (V4 writes tool_calls for function_calls), whose `string` says whether a value is a string or JSON:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true|false">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.argument_types import as_json, converted
from minisgl_backend.parsers.headers import Header
from minisgl_backend.parsers.tag_values import TagValuesParser
from minisgl_backend.parsers.tagged import JsonArgumentsParser

_CALL, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", _END, "<｜tool▁calls▁end｜>")


class DeepSeekV3Parser(JsonArgumentsParser):
    BEGIN = (_CALL,)
    AROUND = (*_AROUND, "```" + _END)
    HEADERS = (Header(("function", _SEPARATOR), ("?```json", "?```")),)
    ENDS = (_END,)


class DeepSeekV31Parser(JsonArgumentsParser):
    BEGIN = (_CALL,)
    AROUND = _AROUND
    HEADERS = (Header((), (_SEPARATOR,)),)
    ENDS = (_END,)


class DeepSeekV32Parser(TagValuesParser):
    BEGIN = ("<｜DSML｜invoke name=",)
    AROUND = tuple(f"<{end}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for end in ("", "/"))
    HEADER = Header(('"',), ('"', ">"))
    OPEN = "<｜DSML｜parameter name="
    KEY = re.compile(r"<｜DSML｜parameter name=\"(?P<key>[^<>\"\n]+)\" string=\"(?P<is_text>true|false)\">")
    KEY_STEPS = (OPEN, re.compile(r"[^<>\n]+"), ">")
    CLOSE = "</｜DSML｜parameter>"
    ENDS = ("</｜DSML｜invoke>",)

    def may_be_text(self, header: re.Match[str]) -> bool:
        return header["is_text"] == "true"

    def as_value(self, header: re.Match[str], text: str) -> str:
        return as_json(text) if self.may_be_text(header) else converted(text, None)
