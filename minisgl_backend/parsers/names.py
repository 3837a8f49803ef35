"""The parsers that an operator may choose, as names alone: the command shows them on systems that cannot serve, too."""

from __future__ import annotations

from minisgl_backend.parsers.table import CALLS, THOUGHTS

TOOL_PARSERS = ("auto", "none", *CALLS)
REASONING_PARSERS = ("auto", "none", *THOUGHTS)
