"""CPU time budget of a step for grammars: all streams wait for masks and matchers, so too slow grammars are refused.

With an ambiguous grammar each token may take longer than the one before, which a dry run of a few tokens cannot show.
"""

from __future__ import annotations

import threading
import time

from minisgl_backend.request import Grammar

CALL_LIMIT_S = 0.25  # for accepting one token of one sequence, or filling one mask
# For all tokens and masks of a step. Far more than harmless grammars need, 4 ms each for 512 of them, and short enough
# to detect growing costs before the engine counts as hanging (HANG_S).
STEP_LIMIT_S = 2.0
MIN_COUNTED_S = 1e-3  # wall time; shorter calls are not counted
TOO_SLOW = "guided_decoding_guide takes too long to follow; allowed: a simpler one"
BUSY = "too many grammars take long to follow now; try again later"


class ThreadClock:
    """CPU time of successive calls on this thread, which excludes time when the thread was not scheduled. Since the
    thread's CPU clock is expensive to read, `cpu_seconds_since` is meant for calls of MIN_COUNTED_S or more."""

    def __init__(self) -> None:
        self._computed = time.thread_time()
        self.now = time.perf_counter()  # when the CPU clock was read last

    def cpu_seconds_since(self, started: float, now: float) -> float:
        """A lower bound of the CPU seconds of a call from `started` to `now`, times of `time.perf_counter()`."""
        before, self._computed = self._computed, time.thread_time()
        # The calls since the last reading took at most their wall time.
        seconds = self._computed - before - (started - self.now)
        self.now = now
        return max(0.0, seconds)


class TimeBudget:
    """Adds up the CPU time of grammars in a step. `charge` is thread-safe."""

    def __init__(self, call_limit_s: float = CALL_LIMIT_S, step_limit_s: float = STEP_LIMIT_S) -> None:
        """Limits in CPU seconds, of one token or mask, and of all in a step."""
        self.call_limit_s = call_limit_s
        self.over_budget: set[Grammar] = set()  # grammars whose sequences must end, so that others have time left
        self._step_limit_s = step_limit_s
        self._spent = 0.0  # in this step
        self._seconds: dict[Grammar, float] = {}  # in this step, of grammars not over budget
        # The costliest grammar has the largest sum of squares, since one with many cheap calls is popular, not slow.
        self._squares: dict[Grammar, float] = {}
        self._too_slow: set[Grammar] = set()  # since the last `drain_too_slow`
        self._lock = threading.Lock()

    @property
    def refuses_new(self) -> bool:
        """The budget is overspent, so calls of unknown cost are refused for the rest of the step: each of many grammars
        might exceed its limit before its cost is known."""
        return self._spent > 2 * self._step_limit_s

    @property
    def refuses_all(self) -> bool:
        """The budget is overspent so far that all further calls of the step are refused: it is better to end some
        sequences than to be restarted as a hanging engine, which ends all."""
        return self._spent > 4 * self._step_limit_s

    def begin_step(self) -> None:
        """Resets the budget for the next step."""
        if self._spent:
            self._spent = 0.0
            self._seconds.clear()
            self._squares.clear()
            self.over_budget.clear()

    def charge(self, grammar: Grammar, seconds: float) -> bool:
        """Counts the CPU seconds of one token or mask. Returns whether this call alone exceeded its limit."""
        with self._lock:
            self._spent += seconds
            if grammar not in self.over_budget:
                self._seconds[grammar] = self._seconds.get(grammar, 0.0) + seconds
                self._squares[grammar] = self._squares.get(grammar, 0.0) + seconds * seconds
            while sum(self._seconds.values()) > self._step_limit_s:
                costliest = max(self._seconds, key=self._squares.__getitem__)
                del self._seconds[costliest]
                del self._squares[costliest]
                self.over_budget.add(costliest)
                self._too_slow.add(costliest)
            if seconds > self.call_limit_s:
                self._too_slow.add(grammar)
        return seconds > self.call_limit_s

    def drain_too_slow(self) -> set[Grammar]:
        """Grammars that exceeded the limit of a call or of a step since the last `drain_too_slow`."""
        if not self._too_slow:
            return set()
        with self._lock:
            too_slow, self._too_slow = self._too_slow, set()
        return too_slow
