"""Tool calls of GLM-4.5, 4.6 and 4.7 (which leaves the line breaks out).

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Only the function's schema says whether a value is a string or JSON.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.headers import Header
from minisgl_backend.parsers.tag_values import TagValuesParser


class GlmParser(TagValuesParser):
    BEGIN = ("<tool_call>",)
    HEADER = Header()
    OPEN = "<arg_key>"
    KEY = re.compile(r"<arg_key>\s*(?P<key>[^<>\n]+?)\s*</arg_key>\s*<arg_value>")
    KEY_STEPS = ("<arg_key>", re.compile(r"[^<>\n]+"), "</arg_key>", "<arg_value>")
    CLOSE = "</arg_value>"
    ENDS = ("</tool_call>",)
