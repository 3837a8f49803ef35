"""Tool calls of Kimi-K2, whose id contains the function's name and the number of earlier calls.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

The id is kept: the next turn's prompt shows it to the model again.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.tagged import JsonArgumentsParser


class KimiK2Parser(JsonArgumentsParser):
    BEGIN = ("<|tool_call_begin|>",)
    AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>")
    HEADER = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*")
