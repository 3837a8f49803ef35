"""Fills the token bitmasks of many matchers on a persistent thread pool.

xgrammar's batch filler starts and ends its threads in every step, which takes longer than most masks. Here the calling
thread fills masks, too, so if helper threads wake up late, or there are none, it does all the work itself. Waking a
helper also takes time, so their number depends on the expected work. xgrammar releases the GIL while it fills.

Masks of new sequences, and all masks if those of the previous step were slow, are timed one by one. A mask that takes
too long is an error.
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
from minisgl_backend.grammar.time_budget import BUSY, MIN_COUNTED_S, TOO_SLOW, ThreadClock, TimeBudget
from minisgl_backend.request import Grammar

log = logging.getLogger(__name__)


MIN_PARALLEL = 4  # fewer masks are filled by the calling thread alone
MAX_BATCH = 64  # masks that are filled in one call, which cannot be interrupted
MAX_THREADS = 8
PARTS_PER_THREAD = 2  # so that a slow mask delays few others
WORK_PER_HELPER_S = 100e-6  # expected work that justifies waking one helper


@dataclass(frozen=True)
class _PartResult:
    """The result of a part."""

    errors: dict[int, Exception]  # by bitmask row; the contents of these rows are undefined
    seconds: float

    def __add__(self, other: _PartResult) -> _PartResult:
        return _PartResult({**self.errors, **other.errors}, self.seconds + other.seconds)


@dataclass(slots=True)
class _Batch:
    """The masks of one step."""

    matchers: list[Any]
    bitmask: Int32Array
    grammar_of: Callable[[int], Grammar]
    num_new: int
    num_timed: int  # the first masks, which are timed one by one; no part has both timed and other masks

    def parts(self, size: int) -> list[range]:
        """Splits the masks into parts of at most `size`."""
        cuts = ((0, self.num_timed), (self.num_timed, len(self.matchers)))
        return [range(start, min(start + size, stop)) for first, stop in cuts for start in range(first, stop, size)]


@dataclass(frozen=True)
class _Job:
    """Threads take the next of `parts` until there are none; helpers put their results into `done`."""

    masks: _Batch
    parts: deque[range]
    fill: Callable[[_Batch, range], _PartResult]
    done: queue.SimpleQueue[_PartResult] = field(default_factory=queue.SimpleQueue)


class MaskFiller:
    """Used by one thread."""

    def __init__(self, budget: TimeBudget, max_threads: int | None = None) -> None:
        """`budget` is charged with the time of masks. `max_threads` includes the calling thread; by default at most
        half of the CPUs. Threads start when needed."""
        self._budget = budget
        cpus = len(os.sched_getaffinity(0))
        self._num_helpers = (max_threads or max(1, min(MAX_THREADS, cpus // 2))) - 1
        self._helpers: ThreadPoolExecutor | None = None
        self._seconds = 0.0  # of the previous step's masks, summed over threads, as an estimate for the next step

    def fill(
        self, matchers: list[Any], bitmask: Int32Array, grammar_of: Callable[[int], Grammar], *, num_new: int = 0
    ) -> dict[int, Exception]:
        """Fills row k of bitmask, int32 [len(matchers) or more, ceil(vocab / 32)], with the mask of matcher k, whose
        grammar is `grammar_of(k)`. The first `num_new` are new, so their cost is unknown.

        Returns errors by row, whose contents are undefined then: what xgrammar raised, InvalidRequestError for a mask
        that takes too long or whose grammar is in `TimeBudget.over_budget`, and CapacityError if the step's budget is
        spent, for new masks before others.
        """
        count = len(matchers)
        is_timed = count == 1 or self._seconds > self._budget.call_limit_s
        masks = _Batch(matchers, bitmask, grammar_of, num_new, count if is_timed else num_new)
        if count < MIN_PARALLEL or not self._num_helpers:
            filled = self._fill_alone(masks)
        else:
            filled = self._fill_parallel(masks)
        self._seconds = filled.seconds
        return filled.errors

    def close(self) -> None:
        """Ends the helper threads."""
        if self._helpers is not None:
            self._helpers.shutdown(wait=False)
        self._num_helpers = 0

    def _fill_alone(self, masks: _Batch) -> _PartResult:
        if len(masks.matchers) == 1:
            return self._fill_part(masks, range(1))
        filled = _PartResult({}, 0.0)
        for part in masks.parts(MAX_BATCH):
            filled += self._fill_part(masks, part)
        return filled

    def _fill_parallel(self, masks: _Batch) -> _PartResult:
        """Fills on several threads, as many as the work justifies."""
        size = -(-len(masks.matchers) // (PARTS_PER_THREAD * (self._num_helpers + 1)))
        parts = deque(masks.parts(min(size, MAX_BATCH)))
        num_parts, job = len(parts), _Job(masks, parts, self._fill_part)
        filled, own, woken = _PartResult({}, 0.0), 0, 0
        while True:
            target = min(int(max(filled.seconds, self._seconds) / WORK_PER_HELPER_S), self._num_helpers, len(parts) - 1)
            if woken < target:
                self._wake(job, target - woken)
                woken = target
            if (part := _next_part(job)) is None:
                break
            filled += self._fill_part(masks, part)
            own += 1
        for _ in range(num_parts - own):
            filled += job.done.get()
        return filled

    def _fill_part(self, masks: _Batch, part: range) -> _PartResult:
        """Does not raise."""
        if part.start < masks.num_timed:
            return self._fill_timed(masks, part)
        filled = _fill_batch(masks, part)
        if filled.seconds > self._budget.call_limit_s:
            masks.num_timed = len(masks.matchers)  # for the remaining parts
        return filled

    def _fill_timed(self, masks: _Batch, part: range) -> _PartResult:
        """Fills and times each mask on its own. Does not raise."""
        budget, clock = self._budget, ThreadClock()
        errors: dict[int, Exception] = {}
        began = now = clock.now
        for index in part:
            if budget.over_budget and masks.grammar_of(index) in budget.over_budget:
                errors[index] = InvalidRequestError(TOO_SLOW)
                continue
            if budget.refuses_all or (index < masks.num_new and budget.refuses_new):
                errors[index] = CapacityError(BUSY)
                continue
            started = now
            try:
                masks.matchers[index].fill_next_token_bitmask(masks.bitmask, index)
            except Exception as error:
                errors[index] = error
            now = time.perf_counter()
            if now - started > MIN_COUNTED_S and budget.charge(
                masks.grammar_of(index), clock.cpu_seconds_since(started, now)
            ):
                errors[index] = InvalidRequestError(TOO_SLOW)
        return _PartResult(errors, now - began)

    def _wake(self, job: _Job, count: int) -> None:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._num_helpers, thread_name_prefix="grammar-masks")
        try:
            for _ in range(count):
                self._helpers.submit(_fill_parts, job)
        except RuntimeError as error:
            log.warning("no thread for another filler of grammar masks: %s", error)
            self._num_helpers = 0


def _fill_parts(job: _Job) -> None:
    while (part := _next_part(job)) is not None:
        job.done.put(job.fill(job.masks, part))


def _next_part(job: _Job) -> range | None:
    try:
        return job.parts.popleft()
    except IndexError:
        return None


def _fill_batch(masks: _Batch, part: range) -> _PartResult:
    """Fills all masks of the part in one call. Does not raise."""
    if len(part) == 1:  # a batch of one takes four times as long as the mask
        return _fill_one_by_one(masks, part)
    try:
        import xgrammar  # before the clock starts: the first import takes a second

        started = time.perf_counter()
        # Most masks take 2 us, and separate calls 0.5 us more for each.
        batch = xgrammar.BatchGrammarMatcher(max_threads=1)
        batch.batch_fill_next_token_bitmask(masks.matchers[part.start : part.stop], masks.bitmask, list(part))
        return _PartResult({}, time.perf_counter() - started)
    except Exception as error:
        log.debug("a batch of masks failed, they are filled one by one: %s", error)
        return _fill_one_by_one(masks, part)


def _fill_one_by_one(masks: _Batch, part: range) -> _PartResult:
    started = time.perf_counter()
    errors: dict[int, Exception] = {}
    for index in part:
        try:
            masks.matchers[index].fill_next_token_bitmask(masks.bitmask, index)
        except Exception as error:
            errors[index] = error
    return _PartResult(errors, time.perf_counter() - started)
