"""What it takes of the processor to follow grammars, and which of them take too much: all streams wait meanwhile.

Of ambiguous grammars each token may take longer than the one before, behind whatever was tried beforehand.
"""

from __future__ import annotations

import threading
import time

from minisgl_backend.request import Grammar

CALL_LIMIT_S = 0.25  # for one token of one sequence, or its mask
# For all tokens and masks of a step. Far more than harmless ones take, 512 of which may have 4 ms each, and so little
# that what grows is found before the engine passes for dead (HANG_S).
STEP_LIMIT_S = 2.0
MIN_COUNTED_S = 1e-3  # of the clock on the wall; what takes less is not counted
TOO_SLOW = "guided_decoding_guide takes too long to follow; allowed: a simpler one"
BUSY = "too many grammars take long to follow now; try again later"


class ThreadClock:
    """What this thread computed in one call after the other. Where the machine stood, it did not compute; but its own
    clock is dear to ask, so `cpu_seconds_since` is for calls of LOOK_S or more."""

    def __init__(self) -> None:
        self._computed = time.thread_time()
        self.now = time.perf_counter()  # of the last look

    def cpu_seconds_since(self, started: float, now: float) -> float:
        """Seconds, at least, that the call took of a processor which began at `started` and has ended at `now`, both
        of time.perf_counter()."""
        before, self._computed = self._computed, time.thread_time()
        # In calls that nobody looked at it has computed for as long as they took, at most.
        seconds = self._computed - before - (started - self.now)
        self.now = now
        return max(0.0, seconds)


class TimeBudget:
    """Adds up what grammars take within a step. Any thread may note."""

    def __init__(self, call_limit_s: float = CALL_LIMIT_S, step_limit_s: float = STEP_LIMIT_S) -> None:
        """Seconds of a processor: what a token or mask of one sequence may take, and all of them in a step."""
        self.call_limit_s = call_limit_s
        self.over_budget: set[Grammar] = set()  # those whose sequences must all end, so that the others have their time
        self._step_limit_s = step_limit_s
        self._spent = 0.0  # in this step
        self._seconds: dict[Grammar, float] = {}  # of it, by those that are not late
        # The costliest grammar is the one with the largest sum of squares: many sequences that take little each are
        # popular, and not slow.
        self._squares: dict[Grammar, float] = {}
        self._too_slow: set[Grammar] = set()  # since `drain_too_slow`
        self._lock = threading.Lock()

    @property
    def refuses_new(self) -> bool:
        """So much is spent that the step takes nothing more of which nobody knows how long it takes: each of many
        grammars may be late by the time that it is known."""
        return self._spent > 2 * self._step_limit_s

    @property
    def refuses_all(self) -> bool:
        """So much is spent that the step takes nothing more at all: better some of its sequences end than the engine,
        and all with it."""
        return self._spent > 4 * self._step_limit_s

    def begin_step(self) -> None:
        """What comes belongs to the next one."""
        if self._spent:
            self._spent = 0.0
            self._seconds.clear()
            self._squares.clear()
            self.over_budget.clear()

    def charge(self, grammar: Grammar, seconds: float) -> bool:
        """A sequence's token or mask took so long. True: too long by itself."""
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
        """Grammars of which a token or mask took too long, or all together did, since the last call."""
        if not self._too_slow:
            return set()
        with self._lock:
            too_slow, self._too_slow = self._too_slow, set()
        return too_slow
