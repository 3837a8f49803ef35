"""What steps take: by what was timed at start, corrected by what steps take now.

At start few steps are timed, each a few times, on a machine that may be busy then, and with short contexts: a step of
one row was found to take between 7 and 11 ms on one processor. So the times at start give the shape alone, and three
factors follow what is measured: of steps without background requests the median of the last ones, and of what rows and
prompt tokens of those add a normalized LMS filter (Widrow and Hoff 1960; Nagumo and Noda 1967) with clipped errors.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minisgl_backend.arrays import Float64Array
from minisgl_backend.step import StepTimes

REMEMBERED = 7  # steps without background requests, whose median counts: others may have slowed some of them
GAIN = 0.1  # of the filter: it forgets all but a third of an error in ten steps
MOST_ERROR = 0.1  # of what a step was expected to take: what differs by more was disturbed, and counts as this
LEAST_PART = 0.1  # of what a step was expected to take: parts below are lost in the noise, and change little by it
LEAST_FACTOR, MOST_FACTOR = 1 / 8, 32.0
# Of a step without any, that one row or token more costs at least by the times at start: what is free has no factor.
# A GPU multiplies some 256 tokens while it reads the weights.
LEAST_SLOPE = 1 / 256


class StepLoad(NamedTuple):
    """What a step computes, of background requests and of others."""

    step: int
    rows: int  # of others, that decode
    prompts: int  # tokens of prompts of others
    background_rows: int
    background_tokens: int  # of prompts
    is_plain: bool = True  # False: it has drafts or encodes images, and takes what nothing here says


class StepEstimate:
    """Seconds of steps, of the load that they have now."""

    def __init__(self, times: StepTimes) -> None:
        least = LEAST_SLOPE * min(times.prompts[0][1], times.rows[0][1])
        self.encoder = times.encoder  # as it was timed: nothing corrects it
        self._prompts = Curve(times.prompts, least)
        # Short chunks take what they were seen to: what is free counts as that.
        self._chunks = Curve(times.prompts, 0.0)
        # Of rows few are timed; one more costs at least what a prompt token does.
        self._rows = Curve(times.rows, least, beyond=self._prompts.slope)
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)
        self._factor, self._row_factor, self._token_factor = 1.0, 1.0, 1.0

    @property
    def is_measured(self) -> bool:
        """Whether enough steps without background requests have been."""
        return len(self._ratios) == REMEMBERED

    @property
    def token_s(self) -> float:
        """Seconds of one more prompt token in a long step."""
        return self._token_factor * self._prompts.slope

    @property
    def steepest_token_s(self) -> float:
        """Likewise, of the longest chunks that were timed."""
        return max(self.token_s, self._token_factor * self._chunks.steepest)

    def alone(self, rows: int, prompts: int) -> float:
        """Seconds of a step without background requests: `rows` decode, `prompts` prompt tokens are computed."""
        return self._factor * self._rows.seconds(rows) + self.prompt_part(prompts)

    def row_part(self, rows: int, more: int) -> float:
        """Seconds that `more` background rows add to a step in which `rows` decode."""
        return self._row_factor * (self._rows.seconds(rows + more) - self._rows.seconds(rows))

    def prompt_part(self, tokens: int) -> float:
        """Seconds that `tokens` prompt tokens add to a step."""
        return self._token_factor * (self._prompts.seconds(tokens) - self._prompts.seconds(0))

    def chunk_part(self, tokens: int) -> float:
        """Likewise of one chunk, whose first tokens may be free."""
        return self._token_factor * (self._chunks.seconds(tokens) - self._chunks.seconds(0))

    def rows_within(self, rows: int, seconds: float) -> int:
        """How many background rows add at most `seconds` to such a step."""
        return self._rows.more(rows, seconds / self._row_factor)

    def tokens_within(self, prompts: int, seconds: float) -> int:
        """How many background prompt tokens add at most `seconds` to a step of `prompts` prompt tokens."""
        return self._prompts.more(prompts, seconds / self._token_factor)

    def note(self, load: StepLoad, seconds: float) -> None:
        """Learns from a step that has taken `seconds`."""
        if load.prompts or not load.rows or not load.is_plain:
            return
        if not (load.background_rows or load.background_tokens):
            self._ratios.append(seconds / self._rows.seconds(load.rows))
            self._factor = _bounded(statistics.median(self._ratios))
        elif self._ratios:  # else it is not known what is theirs of it
            self._note_background(load, seconds)

    def _note_background(self, load: StepLoad, seconds: float) -> None:
        rows, tokens = self.row_part(load.rows, load.background_rows), self.prompt_part(load.background_tokens)
        expected = self.alone(load.rows, 0) + rows + tokens
        most = MOST_ERROR * expected
        error = min(max(seconds - expected, -most), most)
        change = GAIN * error / (rows**2 + tokens**2 + (LEAST_PART * expected) ** 2)
        self._row_factor = _bounded(self._row_factor * (1 + change * rows))
        self._token_factor = _bounded(self._token_factor * (1 + change * tokens))


class Curve:
    """Seconds of steps by the number of something in them: a convex curve that always rises, as for a machine that
    reads weights and multiplies meanwhile. What lies above was disturbed."""

    def __init__(self, times: Sequence[tuple[int, float]], least: float, beyond: float = 0.0) -> None:
        """`times`: (number, seconds), ascending. What one more costs at least: `least`, and `beyond` the largest."""
        counts = np.array([count for count, _ in times], dtype=np.float64)
        seconds = np.array([taken for _, taken in times], dtype=np.float64)
        # None takes less than a smaller one, and `least` more for each that is more.
        seconds = np.minimum.accumulate(seconds[::-1])[::-1] - least * counts
        self._counts, self._seconds = _lower_hull(counts, np.maximum.accumulate(seconds) + least * counts)
        rise, run = self._seconds[-1] - self._seconds[0], self._counts[-1] - self._counts[0]
        self.slope = max(least, beyond, rise / run if run else 0.0)  # seconds of one more beyond the largest number
        steps = np.diff(self._seconds) / np.diff(self._counts)
        self.steepest = float(steps[-1]) if len(steps) else self.slope  # seconds of one more between the largest two

    def seconds(self, count: int) -> float:
        beyond = max(0.0, count - self._counts[-1])
        return float(np.interp(count, self._counts, self._seconds)) + self.slope * beyond

    def more(self, count: int, left: float) -> int:
        """How many more than `count` there may be in a step that may take `left` seconds longer."""
        until, known = self.seconds(count) + left, self._seconds
        if until < known[-1]:
            most = float(np.interp(until, known, self._counts))
        else:
            most = self._counts[-1] + (until - known[-1]) / self.slope
        return max(0, int(most + 1e-6) - count)


def _lower_hull(x: Float64Array, y: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The corners of the convex curve below points of ascending x (Andrew's monotone chain)."""
    corners: list[int] = []
    for at in range(len(x)):
        while len(corners) > 1:
            first, second = corners[-2:]
            if (y[second] - y[first]) * (x[at] - x[first]) < (y[at] - y[first]) * (x[second] - x[first]):
                break
            corners.pop()
        corners.append(at)
    return x[corners], y[corners]


def _bounded(factor: float) -> float:
    return min(max(factor, LEAST_FACTOR), MOST_FACTOR)
