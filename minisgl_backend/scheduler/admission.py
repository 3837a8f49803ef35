"""Admission control: when one more sequence may start, so that running ones are rarely preempted for their pages.

No page is reserved for tokens that may never come. The future demand is estimated instead: each running sequence is
expected to become as long as one of the finished answers that are longer than it is now, and the peak of the demand is
taken along the way, as sequences end and give their pages back. Both ideas are from "Past-Future Scheduler for LLM
Serving under SLA Guarantees" (Gong et al. 2025). Each sequence draws a fixed quantile of the finished lengths, so that
the estimates of all sequences are spread like the answers and do not jump from step to step.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.arrays import BoolArray, Int64Array

HISTORY = 512  # finished answers that the estimate remembers
PRIOR = (64, 128, 256, 512, 1024)  # answer lengths assumed before any is known
FIRST_CAUTION = 1.1  # factor on expected lengths
MOST_CAUTION = 4.0
CAUTION_STEP = 1.25  # at each preemption
GOLDEN_RATIO = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are
CAUTION_DECAY = 0.99  # at each finished answer, back towards FIRST_CAUTION


class Forecast:
    """The pages that running sequences will still need; used for the admissions of one step.

    Args:
        remaining: tokens that each sequence will still produce, [num_running].
        freed: pages, of those held now, that each sequence frees when it ends, [num_running].
        num_full: cache groups without a window, which grow with every token.
        window_growth: pages that all sequences together will take from groups with windows.
    """

    def __init__(
        self, remaining: Int64Array, freed: Int64Array, page_size: int, num_full: int = 1, *, window_growth: int = 0
    ) -> None:
        self._growth = -(-remaining // page_size)
        self._freed = freed
        self._page_size = page_size
        self._num_full = num_full
        self._window_growth = window_growth
        self._sum = int(self._growth.sum())
        self._started: list[tuple[int, int]] = []  # growth and freed pages of sequences admitted since

    def admits(self, remaining: int, new_pages: int, available: int) -> bool:
        """Whether there are pages for one more sequence now and for the later needs of all. If so, the sequence counts
        from now on.

        Args:
            remaining: tokens that the sequence is expected to produce.
            new_pages: pages that it takes now.
            available: pages that are available now.
        """
        growth = -(-remaining // self._page_size)
        self._started.append((growth, new_pages))
        self._sum += growth
        # The sum is the peak if no page is freed meanwhile: this bound decides most cases.
        new_pages += self._window_growth
        if new_pages + self._num_full * self._sum <= available or new_pages + self._peak() <= available:
            return True
        self._started.pop()
        self._sum -= growth
        return False

    def _peak(self) -> int:
        """The most pages that all sequences need at once, on top of those they hold, until the last one ends."""
        growth_of_started, freed_by_started = zip(*self._started, strict=True)
        growth = np.concatenate([self._growth, growth_of_started])
        freed = np.concatenate([self._freed, freed_by_started])
        order = np.argsort(growth, kind="stable")
        alive = np.arange(len(order), 0, -1)
        given_back = np.cumsum(freed[order]) - freed[order]
        return int((self._num_full * alive * growth[order] - given_back).max(initial=0))


class AdmissionControl:
    """Learns how long answers become."""

    def __init__(self) -> None:
        self._lengths = np.array(PRIOR, dtype=np.int64)  # the latest finished answers, oldest first
        self._fresh: list[int] = []  # not yet in `_lengths`
        self._sorted = np.sort(self._lengths)
        self._caution = FIRST_CAUTION

    def saw_answer(self, num_tokens: int) -> None:
        """An answer has ended by itself or at its limit."""
        self._fresh.append(num_tokens)
        self._caution = max(FIRST_CAUTION, self._caution * CAUTION_DECAY)

    def saw_preemption(self) -> None:
        """The estimate was too low: expect more from now on."""
        self._caution = min(MOST_CAUTION, self._caution * CAUTION_STEP)

    def expected_remaining(
        self, admissions: Int64Array, generated: Int64Array, most: Int64Array, ends_early: BoolArray
    ) -> Int64Array:
        """Tokens that each sequence is expected to produce from now on, int64 [num_sequences].

        Args:
            admissions: serial number of each sequence's admission, from which its quantile follows.
            generated: tokens produced so far.
            most: tokens that it may still produce.
            ends_early: false where only its limit ends it, so that it will produce `most` tokens.
        """
        self._learn()
        longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - longer
        quantile = admissions * GOLDEN_RATIO % 1.0
        chosen = self._sorted.take(longer + (quantile * count).astype(np.int64), mode="clip")
        guess = np.where(count > 0, chosen - generated, generated) * self._caution
        return np.where(ends_early, np.minimum(guess.astype(np.int64) + 1, most), most)

    def _learn(self) -> None:
        if not self._fresh:
            return
        self._lengths = np.concatenate([self._lengths, self._fresh])[-HISTORY:]
        self._fresh = []
        self._sorted = np.sort(self._lengths)
