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

from minisgl_backend.parsers.argument_types import ArgumentTypes, as_json, converted
from minisgl_backend.parsers.tagged import JsonArgumentsParser, TagValuesParser

_CALL = "<｜tool▁call▁begin｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


class DeepSeekV3Parser(JsonArgumentsParser):
    BEGIN = (_CALL,)
    AROUND = (*_AROUND, "```<｜tool▁call▁end｜>")
    HEADER = re.compile(r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[\w.\-]+)\s*(?:```(?:json)?\s*)?")


class DeepSeekV31Parser(JsonArgumentsParser):
    BEGIN = (_CALL,)
    AROUND = _AROUND
    HEADER = re.compile(r"\s*(?P<name>[\w.\-]+)\s*<｜tool▁sep｜>\s*")


class DeepSeekV32Parser(TagValuesParser):
    BEGIN = ("<｜DSML｜invoke name=",)
    AROUND = tuple(f"<{end}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for end in ("", "/"))
    END = "</｜DSML｜invoke>"
    CALL = re.compile(r"\s*\"(?P<name>[\w.\-]+)\">(?P<values>.*)", re.DOTALL)
    VALUE = re.compile(
        r"\s*<｜DSML｜parameter name=\"(?P<key>[^<>\"\n]+)\" string=\"(?P<is_text>true|false)\">"
        r"(?P<value>(?:(?!<｜DSML｜parameter |</｜DSML｜parameter>).)*)</｜DSML｜parameter>\s*",
        re.DOTALL,
    )

    def value(self, found: re.Match[str], types: ArgumentTypes) -> str:
        return as_json(found["value"]) if found["is_text"] == "true" else converted(found["value"], None)
