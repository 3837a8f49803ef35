"""Which backend decodes steps of few rows; apart from what runs it, since whoever starts an engine has no torch yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FewRows:
    """Which backend decodes steps of up to `rows` rows."""

    backend: str
    rows: int
