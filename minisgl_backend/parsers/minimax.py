"""Tool calls of MiniMax-M2.

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

Only the function's schema says whether a value is a string or JSON.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.tagged import TagValuesParser


class MiniMaxM2Parser(TagValuesParser):
    BEGIN = ("<invoke name=",)
    AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")
    END = "</invoke>"
    CALL = re.compile(r"\s*([\"']?)(?P<name>[\w.\-]+)\1>(?P<values>.*)", re.DOTALL)
    VALUE = re.compile(
        r"\s*<parameter name=([\"']?)(?P<key>[^<>\"'\n]+)\1>"
        r"(?P<value>(?:(?!<parameter |</parameter>).)*)</parameter>\s*",
        re.DOTALL,
    )
