"""How long to wait before what has failed is started again."""

from __future__ import annotations

from collections.abc import Sequence


class Backoff:
    """Delays in seconds, each for one more failure in a row; for one thread."""

    def __init__(self, delays: Sequence[float], stable_s: float) -> None:
        """The last of `delays` holds for all further ones. What lived longer than `stable_s` had no failure before."""
        self._delays, self._stable_s = delays, stable_s
        self._failures = 0

    def next(self, lived_s: float) -> float:
        """The delay after a failure of what lived so long."""
        failures = 0 if lived_s > self._stable_s else self._failures
        self._failures = failures + 1
        return self._delays[min(failures, len(self._delays) - 1)]
