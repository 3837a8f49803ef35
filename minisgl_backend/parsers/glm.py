"""Tool calls of GLM-4.5, 4.6 and 4.7 (which leaves the line breaks out).

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Only the function's schema says whether a value is a string or JSON.
"""

from __future__ import annotations

import re

from minisgl_backend.parsers.tagged import TagValuesParser


class GlmParser(TagValuesParser):
    BEGIN = ("<tool_call>",)
    END = "</tool_call>"
    CALL = re.compile(r"\s*(?P<name>[\w.\-]+)(?P<values>\s*(?:<arg_key>.*)?)", re.DOTALL)
    VALUE = re.compile(
        r"\s*<arg_key>\s*(?P<key>[^<>\n]+?)\s*</arg_key>\s*"
        r"<arg_value>(?P<value>(?:(?!<arg_key>|</?arg_value>).)*)</arg_value>\s*",
        re.DOTALL,
    )
