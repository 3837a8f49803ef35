"""Counts of durations by upper bound."""

from __future__ import annotations

import bisect

# From the detection that a client has left to the release of its pages: observed by the core, reported by the fronts.
CANCELLATION_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)


class Histogram:
    """Counts by upper bound, with a sum; not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last count is for values above all bounds
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count
