"""Tool calls of DeepSeek V3 and R1, and of V3.1.

V3, R1, R1-0528 and R1's distillations:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.tagged import JsonArgumentsParser

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
