"""Which backend decodes steps with few rows. Needs no torch, which the process that starts an engine does not load."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeByBatch:
    """The backend that decodes steps with few rows; with some of them only while their contexts are short."""

    backend: str
    # (batch size, mean context length in tokens), both upper bounds; ascending batch sizes.
    limits: tuple[tuple[int, float], ...]

    @property
    def rows(self) -> int:
        """Rows up to which `backend` decodes some steps."""
        return self.limits[-1][0]

    def max_context_len(self, batch_size: int) -> float:
        """The largest mean context length, in tokens, at which `backend` decodes this batch size; 0: it never does."""
        return next((tokens for rows, tokens in self.limits if batch_size <= rows), 0)

    def __str__(self) -> str:
        parts = [
            f"{rows} row{'s' * (rows > 1)}" + ("" if math.isinf(tokens) else f" and {tokens:,.0f} tokens each")
            for rows, tokens in self.limits
        ]
        return f"{self.backend} for decode steps of up to " + ", or ".join(parts)
