"""The parsers that an operator may choose, as names alone: the command shows them on systems that cannot serve, too."""

from __future__ import annotations

TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "qwen3_coder")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1")
