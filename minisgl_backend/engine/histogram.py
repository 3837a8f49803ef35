"""Counts of durations by upper bound.

Knows nothing of what is measured or who reads it.
"""

from __future__ import annotations

import bisect


class Histogram:
    """Counts by upper bound, with a sum; not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is above all bounds
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count
