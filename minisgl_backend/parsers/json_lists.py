"""Calls as JSON objects after one tag: Granite 3, MiniMax-M1, Apriel. Granite 4 uses the Hermes format."""

from __future__ import annotations

from minisgl_backend.parsers.tagged import JsonListParser


class GraniteParser(JsonListParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`."""

    BEGIN = ("<|tool_call|>",)


class ToolCallsParser(JsonListParser):
    """`<tool_calls>...</tool_calls>` around a list of them (Apriel), or around one per line (MiniMax-M1)."""

    BEGIN = ("<tool_calls>",)
    AROUND = ("</tool_calls>",)
