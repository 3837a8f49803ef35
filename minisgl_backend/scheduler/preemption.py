"""Preemption by recomputation: which running sequences give row and pages back before they end, and to whom.

The pages of a victim go to the prefix cache, and the sequence waits again with all its tokens. Five things
preempt: rows that decode and groups with windows that lack pages, requests of a higher priority, tenants below their
share, adapters that wait for a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from minisgl_backend.arrays import BoolArray, IndexArray
from minisgl_backend.scheduler.admission import AdmissionControl
from minisgl_backend.scheduler.fairness import FairShares
from minisgl_backend.scheduler.running import RunningSet
from minisgl_backend.scheduler.sequence import Sequence, preempted_first

Fits = Callable[[Sequence, int, int], bool]
"""Whether a waiting sequence can be admitted that takes so many new pages, while so many others get as many."""


class Preemption:
    """Chooses victims and takes their rows and pages back."""

    def __init__(self, running: RunningSet, admission: AdmissionControl) -> None:
        self._running = running
        self._admission = admission
        self.num_preemptions = 0
        self.num_for_running = 0  # those of them whose pages are for running sequences, and not for the queue

    def for_pages(self, index: IndexArray, short: IndexArray) -> BoolArray:
        """Preempts until each row of `index[short]` can get a page, now or once steps in flight have ended.

        Returns which of `index` can be planned now, bool [num_rows]; the others are preempted or wait for one step.
        """
        running, kv = self._running, self._running.kv
        needing = index[short]
        while True:
            needing = needing[running.rows.active[needing]]
            if len(needing) * kv.groups.num_pages <= kv.num_available + running.num_releasing_pages():
                break
            active = running.active()
            if len(active) <= 1:
                break  # only pages that steps in flight still hold are missing
            self._take_for_running(max(active, key=preempted_first))
        served = sorted((running.rows.sequences[row] for row in needing), key=preempted_first)  # type: ignore[type-var]
        waiting = [one.row for one in served[kv.num_extendable :] if one is not None]
        keep = running.rows.active[index]
        keep[np.isin(index, waiting)] = False
        return keep

    def for_window_pages(self, sequence: Sequence, start: int, end: int) -> int:
        """The end of a chunk as far as groups with windows have pages for it; `start` where it has to wait for pages.

        Where there is no page for even one token, sequences that were admitted later are preempted.
        """
        running, kv, needed = self._running, self._running.kv, self._running.kv.groups.num_windows
        while True:
            if (reached := min(end, kv.max_tokens_now(sequence.row))) > start:
                return reached
            victim = max(running.active(), key=preempted_first)
            if victim is sequence or kv.num_available + running.num_releasing_pages() >= needed:
                return start
            self._take_for_running(victim)

    def for_priority(self, head: Sequence, fits: Fits) -> bool:
        """Preempts background sequences for `head`, which is none, where it waits for a row or for pages. Returns
        whether it did."""
        running = self._running
        pages = running.kv.groups.pages_of_row(len(head.token_ids))
        if running.rows.num_free and fits(head, pages, 0):
            return False
        missing, victims = pages - running.kv.num_available, []
        for victim in sorted((one for one in running.active() if one.is_background), key=preempted_first)[::-1]:
            victims.append(victim)
            missing -= _private_pages(running, [victim])
            if missing <= 0:
                break
        self._take(victims)
        return True

    def for_fair_share(self, head: Sequence, shares: FairShares, fits: Fits) -> int:
        """Preempts for a tenant below its guaranteed rows, whose next sequence is `head`. Returns how many like it fit
        without."""
        running = self._running
        victims = shares.victims(running.active())
        # Each victim makes way for one sequence like the head; none is needed for those that already fit.
        pages, fitting = running.kv.groups.pages_of_row(len(head.token_ids)), 0
        while fitting < min(len(victims), running.rows.num_free) and fits(head, pages, fitting):
            fitting += 1
        # Where preempting all of them would not make enough room, none is.
        if pages <= running.kv.num_available + _private_pages(running, victims[fitting:]):
            self._take(victims[fitting:])
        return fitting

    def for_adapter(self, victims: list[Sequence]) -> None:
        """Preempts the running sequences of an adapter, for another one that waits for its slot."""
        self._take(victims)

    def _take_for_running(self, victim: Sequence) -> None:
        self.num_for_running += 1
        self._admission.saw_preemption()
        self._take([victim])

    def _take(self, victims: list[Sequence]) -> None:
        for victim in victims:
            self.num_preemptions += 1
            self._running.preempt(victim)
        self._running.release_finished()


def _private_pages(running: RunningSet, sequences: Iterable[Sequence]) -> int:
    """The pages that come back when these sequences are released."""
    return sum(running.kv.num_exclusive(one.lease) for one in sequences if one.lease is not None)
