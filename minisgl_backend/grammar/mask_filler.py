"""Fills the masks of many grammars on a few threads that stay.

xgrammar's own filler starts its threads anew in every step and ends them, which takes longer than most masks do. Here
the caller fills too: where helpers wake late, or there are none, it has done all by then. To wake one takes time as
well, so only as many are woken as the work is worth. xgrammar lets go of Python's lock while it fills.

Where they took long in the step before, and of those of which nobody knows, each is timed for itself. What takes too
long is an error.
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

from minisgl_backend.arrays import Int32Array
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.grammar.pace import BUSY, LOOK_S, TOO_SLOW, Pace, ThreadClock
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)


MIN_SHARED = 4  # masks that several threads may fill
MOST_TOGETHER = 64  # masks that are filled in one call, which nothing can end
MAX_THREADS = 8
PARTS_A_THREAD = 2  # a mask that takes long holds up few others
WORTH_S = 100e-6  # of work, for each helper that is woken


@dataclass(frozen=True)
class _Filled:
    """What came of a part."""

    errors: dict[int, Exception]  # by line; such lines hold anything
    seconds: float


@dataclass(slots=True)
class _Masks:
    """Those of one step."""

    matchers: list[Any]
    bits: Int32Array
    grammar_of: Callable[[int], Grammar]
    num_new: int
    num_timed: int  # each of the first ones; no part lies on both sides

    def parts(self, size: int) -> list[range]:
        """Of so many masks at most."""
        cuts = ((0, self.num_timed), (self.num_timed, len(self.matchers)))
        return [range(start, min(start + size, stop)) for first, stop in cuts for start in range(first, stop, size)]


@dataclass(frozen=True)
class _Job:
    """Parts are taken from `parts` by whoever comes; `done` hears of those of helpers."""

    masks: _Masks
    parts: deque[range]
    fill: Callable[[_Masks, range], _Filled]
    done: queue.SimpleQueue[_Filled] = field(default_factory=queue.SimpleQueue)


class MaskFiller:
    """Used by one thread."""

    def __init__(self, pace: Pace, max_threads: int | None = None) -> None:
        """`pace` counts what masks take. `max_threads`, with the caller's: by default at most half of the processors.
        They start when needed."""
        self._pace = pace
        cpus = len(os.sched_getaffinity(0))
        self._num_helpers = (max_threads or max(1, min(MAX_THREADS, cpus // 2))) - 1
        self._helpers: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # that the masks of the step before took all threads together: the next are much like them

    def fill(
        self, matchers: list[Any], bits: Int32Array, grammar_of: Callable[[int], Grammar], *, num_new: int = 0
    ) -> dict[int, Exception]:
        """Fills line k of bits [len(matchers) or more, ceil(vocab / 32)] by matcher k, whose grammar is
        `grammar_of(k)`. Of the first `num_new` nobody knows how long they take, since no step had them before.

        Returns by line what xgrammar raised, InvalidRequestError for a mask that takes too long or whose grammar was
        late before (`Pace.late`), and CapacityError for one that finds no time left, new ones before others; such lines
        hold anything.
        """
        count = len(matchers)
        is_timed = count == 1 or self._seconds > self._pace.late_s
        masks = _Masks(matchers, bits, grammar_of, num_new, count if is_timed else num_new)
        if count < MIN_SHARED or not self._num_helpers:
            filled = self._fill_alone(masks)
        else:
            filled = self._fill_shared(masks)
        self._seconds = filled.seconds
        return filled.errors

    def close(self) -> None:
        """Ends the helpers."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
        self._num_helpers = 0

    def _fill_alone(self, masks: _Masks) -> _Filled:
        if len(masks.matchers) == 1:
            return self._fill_part(masks, range(1))
        errors: dict[int, Exception] = {}
        seconds = 0.0
        for part in masks.parts(MOST_TOGETHER):
            filled = self._fill_part(masks, part)
            seconds += filled.seconds
            errors |= filled.errors
        return _Filled(errors, seconds)

    def _fill_shared(self, masks: _Masks) -> _Filled:
        """With as many helpers as it is worth."""
        size = -(-len(masks.matchers) // (PARTS_A_THREAD * (self._num_helpers + 1)))
        parts = deque(masks.parts(min(size, MOST_TOGETHER)))
        num_parts, job = len(parts), _Job(masks, parts, self._fill_part)
        errors: dict[int, Exception] = {}
        seconds, own, woken = 0.0, 0, 0
        while True:
            wanted = min(int(max(seconds, self._seconds) / WORTH_S), self._num_helpers, len(parts) - 1)
            if woken < wanted:
                self._wake(job, wanted - woken)
                woken = wanted
            if (part := _next_part(job)) is None:
                break
            filled = self._fill_part(masks, part)
            own += 1
            seconds += filled.seconds
            errors |= filled.errors
        for _ in range(num_parts - own):
            filled = job.done.get()
            seconds += filled.seconds
            errors |= filled.errors
        return _Filled(errors, seconds)

    def _fill_part(self, masks: _Masks, part: range) -> _Filled:
        """Never raises."""
        if part.start < masks.num_timed:
            return self._fill_timed(masks, part)
        filled = _fill_together(masks, part)
        if filled.seconds > self._pace.late_s:
            masks.num_timed = len(masks.matchers)  # the other parts
        return filled

    def _fill_timed(self, masks: _Masks, part: range) -> _Filled:
        """Each alone. Never raises."""
        pace, clock = self._pace, ThreadClock()
        errors: dict[int, Exception] = {}
        began = now = clock.now
        for line in part:
            if pace.late and masks.grammar_of(line) in pace.late:
                errors[line] = InvalidRequestError(TOO_SLOW)
                continue
            if pace.is_over or (line < masks.num_new and pace.is_exhausted):
                errors[line] = CapacityError(BUSY)
                continue
            started = now
            try:
                masks.matchers[line].fill_next_token_bitmask(masks.bits, line)
            except Exception as error:
                errors[line] = error
            now = time.perf_counter()
            if now - started > LOOK_S and pace.note(masks.grammar_of(line), clock.computed_since(started, now)):
                errors[line] = InvalidRequestError(TOO_SLOW)
        return _Filled(errors, now - began)

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
        job.done.put(job.fill(job.masks, part))


def _next_part(job: _Job) -> range | None:
    try:
        return job.parts.popleft()
    except IndexError:
        return None


def _fill_together(masks: _Masks, part: range) -> _Filled:
    """Never raises."""
    if len(part) == 1:  # a batch of one takes four times as long as the mask
        return _fill_each(masks, part)
    try:
        import xgrammar  # the first time takes a second, which is no mask's

        started = time.perf_counter()
        # One call for all: most masks take 2 us, and calls of their own half a microsecond more.
        batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        batch.batch_fill_next_token_bitmask(masks.matchers[part.start : part.stop], masks.bits, list(part))
        return _Filled({}, time.perf_counter() - started)
    except Exception as error:
        log.debug("which of these masks it was, each alone will show: %s", error)
        return _fill_each(masks, part)


def _fill_each(masks: _Masks, part: range) -> _Filled:
    started = time.perf_counter()
    errors: dict[int, Exception] = {}
    for line in part:
        try:
            masks.matchers[line].fill_next_token_bitmask(masks.bits, line)
        except Exception as error:
            errors[line] = error
    return _Filled(errors, time.perf_counter() - started)
