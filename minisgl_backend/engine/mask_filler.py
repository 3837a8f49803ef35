"""Fills the masks of many grammars on a few threads that stay.

xgrammar's own filler starts its threads anew in every step and ends them, which takes longer than most masks do. Here
the caller fills too: where helpers wake late, or there are none, it has done all by then. To wake one takes time as
well, so only as many are woken as the work is worth. xgrammar lets go of Python's lock while it fills.

Masks of ambiguous grammars take longer with each token, and all sequences wait for them: where they took long in the
step before, each is timed, and one that takes too long is an error.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]

MIN_SHARED = 4  # masks that several threads may fill
MAX_THREADS = 8
PARTS_A_THREAD = 2  # a mask that takes long holds up few others
WORTH_S = 100e-6  # of work, for each helper that is woken


@dataclass(frozen=True)
class _Filled:
    """What came of a part."""

    seconds: float
    errors: dict[int, Exception]  # by line; such lines hold anything


@dataclass(frozen=True)
class _Job:
    """The masks of one step. Parts are taken from `parts` by whoever comes; `done` hears of those of helpers."""

    matchers: list[Any]
    bits: Int32Array
    parts: deque[range]
    fill: Callable[[list[Any], Int32Array, range], _Filled]
    done: queue.SimpleQueue[_Filled] = field(default_factory=queue.SimpleQueue)


class MaskFiller:
    """Used by one thread."""

    def __init__(self, late_s: float, max_threads: int | None = None) -> None:
        """`late_s`: what one mask may take of a thread's own time. `max_threads`, with the caller's: by default at most
        half of the processors. They start when needed."""
        self._late_s = late_s
        cpus = len(os.sched_getaffinity(0))
        self._num_helpers = (max_threads or max(1, min(MAX_THREADS, cpus // 2))) - 1
        self._helpers: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # that the masks of the step before took all threads together: the next are much like them

    def fill(self, matchers: list[Any], bits: Int32Array) -> dict[int, Exception]:
        """Fills line k of bits [len(matchers) or more, ceil(vocab / 32)] by matcher k.

        Returns by line what xgrammar raised, and TimeoutError for a mask that takes too long; such lines hold anything.
        """
        count = len(matchers)
        fill = self._fill_timed if count == 1 or self._seconds > self._late_s else _fill_together
        if count < MIN_SHARED or not self._num_helpers:
            filled = fill(matchers, bits, range(count))
            self._seconds = filled.seconds
            return filled.errors
        size = -(-count // (PARTS_A_THREAD * (self._num_helpers + 1)))
        parts = deque(range(start, min(start + size, count)) for start in range(0, count, size))
        num_parts, job = len(parts), _Job(matchers, bits, parts, fill)
        errors: dict[int, Exception] = {}
        seconds, own, woken = 0.0, 0, 0
        while True:
            wanted = min(int(max(seconds, self._seconds) / WORTH_S), self._num_helpers, len(parts) - 1)
            if woken < wanted:
                self._wake(job, wanted - woken)
                woken = wanted
            if (part := _next_part(job)) is None:
                break
            filled = fill(matchers, bits, part)
            own += 1
            seconds += filled.seconds
            errors |= filled.errors
        for _ in range(num_parts - own):
            filled = job.done.get()
            seconds += filled.seconds
            errors |= filled.errors
        self._seconds = seconds
        return errors

    def close(self) -> None:
        """Ends the helpers."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
        self._num_helpers = 0

    def _fill_timed(self, matchers: list[Any], bits: Int32Array, part: range) -> _Filled:
        """Each alone. Never raises."""
        started = time.perf_counter()
        errors: dict[int, Exception] = {}
        for line in part:
            computed = time.thread_time()
            try:
                matchers[line].fill_next_token_bitmask(bits, line)
            except Exception as error:
                errors[line] = error
            if time.thread_time() - computed > self._late_s:
                errors[line] = TimeoutError(f"a mask takes longer than {self._late_s:g} s")
        return _Filled(time.perf_counter() - started, errors)

    def _wake(self, job: _Job, count: int) -> None:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._num_helpers, thread_name_prefix="grammar-masks")
        try:
            for _ in range(count):
                self._helpers.submit(_help, job)
        except RuntimeError as error:
            log.warning("no thread for another filler of grammar masks: %s", error)
            self._num_helpers = 0


def _help(job: _Job) -> None:
    while (part := _next_part(job)) is not None:
        job.done.put(job.fill(job.matchers, job.bits, part))


def _next_part(job: _Job) -> range | None:
    try:
        return job.parts.popleft()
    except IndexError:
        return None


def _fill_together(matchers: list[Any], bits: Int32Array, part: range) -> _Filled:
    """Never raises."""
    started = time.perf_counter()
    errors: dict[int, Exception] = {}
    try:
        import xgrammar

        # One call for all: most masks take 2 us, and calls of their own half a microsecond more.
        batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        batch.batch_fill_next_token_bitmask(matchers[part.start : part.stop], bits, list(part))
    except Exception as error:
        log.debug("which of these masks it was, each alone will show: %s", error)
        for line in part:
            try:
                matchers[line].fill_next_token_bitmask(bits, line)
            except Exception as error:
                errors[line] = error
    return _Filled(time.perf_counter() - started, errors)
