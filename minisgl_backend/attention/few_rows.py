"""Which backend decodes steps with few rows. Needs no torch, which the process that starts an engine does not load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FewRows:
    """The backend that decodes steps of up to `rows` rows."""

    backend: str
    rows: int
