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

from minisgl_backend.parsers.headers import Header
from minisgl_backend.parsers.tag_values import TagValuesParser


class MiniMaxM2Parser(TagValuesParser):
    BEGIN = ("<invoke name=",)
    AROUND = ("<minimax:tool_call>", "</minimax:tool_call>")
    HEADER = Header(('?"', "?'"), ('?"', "?'", ">"))
    OPEN = "<parameter name="
    KEY = re.compile(r"<parameter name=([\"']?)(?P<key>[^<>\"'\n]+)\1>")
    KEY_STEPS = ("<parameter name=", re.compile(r"[^<>\n]+"), ">")
    CLOSE = "</parameter>"
    ENDS = ("</invoke>",)
