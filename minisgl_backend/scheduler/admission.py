"""When one more sequence may start, so that pages are rarely taken from a running one.

Knows nothing of queues or page ids.

No page is reserved for tokens that may never come. Instead the demand to come is estimated: each running sequence is
expected to end at the mean length of those finished answers that were longer than it is now, and the peak of the
demand is found on the way there, when some have ended and given their pages back. The peak computation is the one of
"Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al. 2025).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

HISTORY = 512  # finished answers that the estimate remembers
PRIOR = (64, 128, 256, 512, 1024)  # answer lengths assumed before any is known
FIRST_CAUTION = 1.1  # factor on expected lengths
MOST_CAUTION = 4.0
CAUTION_STEP = 1.25  # at each preemption
CAUTION_DECAY = 0.99  # at each finished answer, back towards FIRST_CAUTION


class AdmissionControl:
    """Learns how long answers get, and judges whether one more prompt fits."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._lengths = np.array(PRIOR, dtype=np.int64)  # the latest finished answers, oldest first
        self._fresh: list[int] = []  # not yet in `_lengths`
        self._sorted = np.sort(self._lengths)
        self._sums = _sums_from(self._sorted)
        self._caution = FIRST_CAUTION

    def saw_answer(self, num_tokens: int) -> None:
        """An answer ended by itself or by its limit."""
        self._fresh.append(num_tokens)
        self._caution = max(FIRST_CAUTION, self._caution * CAUTION_DECAY)

    def saw_preemption(self) -> None:
        """The estimate was too low: expect more from now on."""
        self._caution = min(MOST_CAUTION, self._caution * CAUTION_STEP)

    def expected_remaining(self, generated: IntArray, most: IntArray, ends_early: npt.NDArray[np.bool_]) -> IntArray:
        """Tokens that each sequence is expected to produce from now on, int64 [num_sequences].

        Args:
            generated: tokens produced so far.
            most: tokens that it could still produce.
            ends_early: false where nothing but its limit ends it, so that it will produce `most`.
        """
        self._learn()
        longer = np.searchsorted(self._sorted, generated, side="right")
        count = len(self._sorted) - longer
        mean = self._sums[longer] // np.maximum(count, 1)
        guess = np.where(count > 0, mean - generated, generated) * self._caution
        return np.where(ends_early, np.minimum(guess.astype(np.int64) + 1, most), most)

    def peak_pages(self, remaining: IntArray, freed: IntArray) -> int:
        """The most pages that these sequences will need on top of what they hold now.

        Args:
            remaining: tokens that each will still produce.
            freed: pages that each gives back at its end, of those it holds now.
        """
        order = np.argsort(remaining, kind="stable")
        growth = -(-remaining[order] // self._page_size)
        alive = np.arange(len(order), 0, -1)
        given_back = np.cumsum(freed[order]) - freed[order]
        return int((alive * growth - given_back).max(initial=0))

    def _learn(self) -> None:
        if not self._fresh:
            return
        self._lengths = np.concatenate([self._lengths, self._fresh])[-HISTORY:]
        self._fresh = []
        self._sorted = np.sort(self._lengths)
        self._sums = _sums_from(self._sorted)


def _sums_from(values: IntArray) -> IntArray:
    """Sums of values[i:], int64 [len(values) + 1]."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0]])
