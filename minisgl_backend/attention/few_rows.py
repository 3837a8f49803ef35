"""Which backend decodes steps with few rows. Needs no torch, which the process that starts an engine does not load."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class FewRows:
    """The backend that decodes steps with few rows; with some of them only while their contexts are short."""

    backend: str
    # Ascending: a step of up to so many rows is decoded by `backend` if their mean context has up to so many tokens.
    most_tokens: tuple[tuple[int, float], ...]

    @property
    def rows(self) -> int:
        """Rows up to which `backend` decodes some steps."""
        return self.most_tokens[-1][0]

    def bound(self, rows: int) -> float:
        """Tokens of the mean context up to which `backend` decodes steps of so many rows; 0: none of them."""
        return next((tokens for most, tokens in self.most_tokens if rows <= most), 0)

    def __str__(self) -> str:
        parts = [
            f"{rows} row{'s' * (rows > 1)}" + ("" if math.isinf(tokens) else f" and {tokens:,.0f} tokens each")
            for rows, tokens in self.most_tokens
        ]
        return f"{self.backend} for decode steps of up to " + ", or ".join(parts)
