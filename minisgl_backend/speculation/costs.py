"""What steps of so many tokens take, as measured while they run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import Float64Array

REMEMBERED = 7  # steps of one size, whose median counts: others may have slowed some of them
KEPT_STEPS = 1024  # after so many steps a size is forgotten: what was slow then may be quick now
UNKNOWN_SLOPE = 0.01  # what a token more is taken to cost beyond the largest size that is known


class ProposalCosts:
    """Seconds of a proposer's own steps, by the tokens that they propose of each row."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._samples)

    def note(self, count: int, seconds: float) -> None:
        """A step has ended."""
        self._samples.setdefault(count, deque(maxlen=REMEMBERED)).append(seconds)

    def of(self, counts: Sequence[int]) -> Float64Array:
        """Seconds of steps that propose `counts` tokens of each row, [k]; 0 where nothing is known.

        Each token takes a pass: what was not measured is in proportion to what was.
        """
        known = sorted(self._samples)
        medians = [_median(self._samples[count]) for count in known]
        sizes = np.asarray(counts, dtype=np.float64)
        if not known:
            return np.zeros(len(sizes))
        costs: Float64Array = np.interp(sizes, [0.0, *known], [0.0, *medians])
        return costs * np.maximum(1.0, sizes / known[-1])


class StepCosts:
    """Seconds of steps that only decode, by the tokens that they compute."""

    def __init__(self, timed: Sequence[tuple[int, float]] = ()) -> None:
        """`timed`: (tokens, seconds) of steps at start, ascending. What was not measured yet is in
        proportion to them."""
        self._timed_sizes = np.array([size for size, _ in timed], dtype=np.float64)
        self._timed_seconds = _undisturbed([taken for _, taken in timed])
        self._samples: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}  # by size: when it was measured last, in steps
        self._now = 0
        self._known: tuple[Float64Array, Float64Array] | None = None  # None: out of date

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._now += 1
        self._seen[num_tokens] = self._now
        self._samples.setdefault(num_tokens, deque(maxlen=REMEMBERED)).append(seconds)
        self._known = None

    def pass_step(self) -> None:
        """A step of another kind has ended: what is known of these ages."""
        self._now += 1
        if self._now % KEPT_STEPS == 0:
            self._known = None

    def of(self, num_tokens: Sequence[float] | Float64Array) -> Float64Array | None:
        """Seconds of steps of these sizes, [k]; None where nothing is known."""
        if self._known is None:
            self._forget()
            known = sorted(self._samples)
            seconds = _undisturbed([_median(self._samples[size]) for size in known])
            self._known = np.array(known, dtype=np.float64), seconds
        sizes_known, seconds = self._known
        if not len(sizes_known):
            return None
        sizes = np.asarray(num_tokens, dtype=np.float64)
        factors = 1.0 + UNKNOWN_SLOPE * np.maximum(sizes - sizes_known[-1], 0.0)
        if len(self._timed_sizes):
            factors = np.maximum(
                factors, self.expected(np.maximum(sizes, sizes_known[-1])) / self.expected(sizes_known[-1:])
            )
        costs: Float64Array = np.interp(sizes, sizes_known, seconds) * factors
        return costs

    def expected(self, num_tokens: Sequence[float] | Float64Array) -> Float64Array:
        """Seconds of steps of these sizes by what was timed at start, [k]; 1 each where nothing was."""
        if not len(self._timed_sizes):
            return np.ones(len(num_tokens))
        costs: Float64Array = np.interp(num_tokens, self._timed_sizes, self._timed_seconds)
        return costs

    def _forget(self) -> None:
        for size in [size for size, seen in self._seen.items() if seen < self._now - KEPT_STEPS]:
            del self._samples[size], self._seen[size]


def _median(samples: deque[float]) -> float:
    return sorted(samples)[len(samples) // 2]


def _undisturbed(seconds: list[float]) -> Float64Array:
    """By ascending size. A larger step takes no less: what says otherwise was disturbed."""
    return np.minimum.accumulate(np.array(seconds, dtype=np.float64)[::-1])[::-1]
