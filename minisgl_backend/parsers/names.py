"""The names of the available parsers, for the command's help on systems that cannot serve."""

from __future__ import annotations

from minisgl_backend.parsers.table import CALLS, THOUGHTS

TOOL_PARSERS = ("auto", "none", *CALLS)
REASONING_PARSERS = ("auto", "none", *THOUGHTS)
