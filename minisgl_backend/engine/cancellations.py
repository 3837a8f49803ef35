"""How long sequences stay after their client was found gone, and which of them stayed too long."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from minisgl_backend.ipc.histogram import CANCELLATION_BOUNDS_S, Histogram

ALLOWED_STEPS = 2
ALLOWED_S = 0.05  # beside those steps
_REMEMBERED_STEPS = 1024


class Cancellations:
    """All times are time.monotonic() seconds, which the processes of one machine share."""

    def __init__(self) -> None:
        self.seconds = Histogram(CANCELLATION_BOUNDS_S)  # from the finding to the return of the sequence's pages
        self.num_late = 0  # more than ALLOWED_STEPS steps and ALLOWED_S
        self._found: dict[int, float] = {}  # by uid, until the engine loop's turn ends
        self._step_ends: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    def begin(self, uids: Iterable[int], found_at: float) -> None:
        """The core has heard that the client of these was found gone at that time."""
        for uid in uids:
            self._found.setdefault(uid, found_at)

    def end_turn(self, ended: Iterable[int], now: float, *, stepped: bool) -> None:
        """A turn of the engine loop is over; `ended` are those whose last record is among its outputs.

        The step that was in flight when they were ended has been committed in this turn: nothing names their pages.
        """
        if stepped:
            self._step_ends.append(now)
        if not self._found:
            return
        for uid in ended:
            if (found_at := self._found.pop(uid, None)) is not None:
                self._observe(found_at, now)
        self._found.clear()  # the others were gone before

    def _observe(self, found_at: float, now: float) -> None:
        self.seconds.observe(max(0.0, now - found_at))
        if now - found_at <= ALLOWED_S:
            return
        ends = list(self._step_ends)
        last_allowed = bisect_right(ends, found_at) + ALLOWED_STEPS - 1
        if last_allowed < len(ends) and now - ends[last_allowed] > ALLOWED_S:
            self.num_late += 1
