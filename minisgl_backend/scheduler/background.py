"""What requests below the default priority, as those of batches, have of a step while others run.

A step takes the longer the more rows decode in it and the more prompt tokens it has, and how much longer depends on the
machine: where weights have to be read anyway a few more cost little, and on a CPU a row costs several times what a
prompt token does. So the share is a time: background requests may lengthen a step to `slowdown` times what it takes
without them, by what steps took when the engine started. Steps with prompts of others have none: first tokens come
first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from minisgl_backend.step import StepTimes

UNLIMITED = sys.maxsize
PASSED_OVER = 8  # steps with prompts of others, after which one has background tokens all the same


class BackgroundShare:
    """Of each step beside other requests."""

    def __init__(self, slowdown: float, times: StepTimes | None) -> None:
        """`slowdown`: how many times as long a step may take, 1 or more. `times`: None where nothing is known, and the
        share has no bound."""
        self._slowdown = slowdown
        self._prompts = _Curve(() if times is None else times.prompts)
        # Of rows few are timed; one more costs at least what a prompt token does.
        self._rows = _Curve(() if times is None else times.rows, least_slope=self._prompts.slope)
        self._passed_over = 0  # steps, one after the other

    def of_step(self, rows: int, prompts: int, background: int) -> tuple[int, int]:
        """How many background rows a step may have, and how many tokens of background prompts.

        Args:
            rows: of others, that decode.
            prompts: tokens of prompts of others.
            background: background rows that are there; the tokens come on top of as many of them as may decode.
        """
        if self._slowdown <= 1:
            return 0, 0
        if prompts and self._passed_over < PASSED_OVER:
            self._passed_over += 1
            return 0, 0
        self._passed_over = 0
        # Of a step without either: what rows and prompts cost is counted apart, on top of it.
        taken = self._rows.seconds(rows) + self._prompts.seconds(prompts) - self._prompts.seconds(0)
        left = (self._slowdown - 1) * taken
        most_rows = self._rows.more(rows, left)
        left -= self._rows.seconds(rows + min(most_rows, background)) - self._rows.seconds(rows)
        most_tokens = self._prompts.more(prompts, left)
        if most_rows or most_tokens:
            return most_rows, most_tokens
        return (1, 0) if background else (0, 1)  # background requests go on, however slow it is


class _Curve:
    """Seconds of steps by the number of something in them, which never fall: what says otherwise was disturbed."""

    def __init__(self, times: Sequence[tuple[int, float]], least_slope: float = 0.0) -> None:
        """`times`: (number, seconds), ascending. `least_slope`: what one more costs at least beyond the largest."""
        self._counts = np.array([count for count, _ in times] or [0], dtype=np.float64)
        seconds = np.array([taken for _, taken in times] or [0.0], dtype=np.float64)
        self._seconds = np.minimum.accumulate(seconds[::-1])[::-1]
        rise, run = self._seconds[-1] - self._seconds[0], self._counts[-1] - self._counts[0]
        self.slope = max(least_slope, rise / run if run else 0.0)  # seconds of one more beyond the largest number

    def seconds(self, count: int) -> float:
        beyond = max(0.0, count - self._counts[-1])
        return float(np.interp(count, self._counts, self._seconds)) + self.slope * beyond

    def more(self, count: int, left: float) -> int:
        """How many more than `count` there may be in a step that may take `left` seconds longer."""
        until, known = self.seconds(count) + left, self._seconds
        if until < known[-1]:
            above = int(np.searchsorted(known, until, side="right"))
            part = (until - known[above - 1]) / (known[above] - known[above - 1])
            most = self._counts[above - 1] + part * (self._counts[above] - self._counts[above - 1])
        elif self.slope > 0:
            most = self._counts[-1] + (until - known[-1]) / self.slope
        else:
            return UNLIMITED
        return max(0, int(most + 1e-6) - count)
