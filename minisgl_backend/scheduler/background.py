"""What requests below the default priority, as those of batches, have of a step while others run.

A step of rows and prompt tokens takes the longer the more tokens it has, and how much longer depends on the machine:
where weights have to be read anyway a few tokens more cost little. So the share is a time: background tokens may
lengthen a step to `slowdown` times what it takes without them, by what steps took when the engine started. Steps with
prompts of others have none: first tokens come first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

UNLIMITED = sys.maxsize
PASSED_OVER = 8  # steps with prompts of others, after which one has background tokens all the same


class BackgroundShare:
    """Of each step beside other requests."""

    def __init__(self, slowdown: float, step_seconds: Sequence[tuple[int, float]]) -> None:
        """`slowdown`: how many times as long a step may take, 1 or more. `step_seconds`: (tokens, seconds) of steps,
        ascending; with fewer than two of them nothing is known, and the share has no bound."""
        self._slowdown = slowdown
        self._passed_over = 0  # steps, one after the other
        self._sizes = np.array([tokens for tokens, _ in step_seconds], dtype=np.float64)
        # A larger step takes no less: what says otherwise was disturbed.
        seconds = np.array([taken for _, taken in step_seconds], dtype=np.float64)
        self._seconds = np.minimum.accumulate(seconds[::-1])[::-1]

    def most_tokens(self, decoding: int, prompts: int) -> int:
        """Background tokens that a step may have beside others: rows that decode, and tokens of prompts."""
        if self._slowdown <= 1:
            return 0
        if prompts and self._passed_over < PASSED_OVER:
            self._passed_over += 1
            return 0
        self._passed_over = 0
        return self._share(decoding + prompts)

    def _share(self, others: int) -> int:
        """One or more, so that background requests go on."""
        if len(self._sizes) < 2:
            return UNLIMITED
        sizes, seconds = self._sizes, self._seconds
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])  # beyond the largest size
        taken = float(np.interp(others, sizes, seconds)) + slope * max(0.0, others - sizes[-1])
        allowed = self._slowdown * taken
        if allowed < seconds[-1]:
            behind = int(np.searchsorted(seconds, allowed, side="right"))
            part = (allowed - seconds[behind - 1]) / (seconds[behind] - seconds[behind - 1])
            most = sizes[behind - 1] + part * (sizes[behind] - sizes[behind - 1])
        elif slope > 0:
            most = sizes[-1] + (allowed - seconds[-1]) / slope
        else:
            return UNLIMITED
        return max(1, int(most) - others)
