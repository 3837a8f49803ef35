"""Tool calls of Kimi-K2, whose id contains the function's name and the number of earlier calls.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

The id is kept: the next turn's prompt shows it to the model again.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.headers import Header
from minisgl_backend.parsers.tagged import JsonArgumentsParser

_ARGUMENTS = "<|tool_call_argument_begin|>"
_BEFORE = ("?functions.",)


class KimiK2Parser(JsonArgumentsParser):
    BEGIN = ("<|tool_call_begin|>",)
    AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>")
    HEADERS = (Header(_BEFORE, (":", re.compile("[0-9]+"), _ARGUMENTS)), Header(_BEFORE, (_ARGUMENTS,)))
    ENDS = ("<|tool_call_end|>",)

    def id_of(self, header: str) -> str:
        return header.strip().removesuffix(_ARGUMENTS).strip()
