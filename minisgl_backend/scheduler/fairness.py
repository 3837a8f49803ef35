"""Fair shares between tenants: who is admitted next, and who loses a row by preemption.

Each tenant has a counter of the tokens that it was served (computed prompt tokens and sampled ones), divided by its
weight. The waiting tenant with the lowest counter goes first. A tenant that returns after a pause is lifted to the
lowest counter of the others, or to that of the tenant that left last, so that a pause saves up no credit. This is the
Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al. 2024).

Counters alone would leave all rows to a tenant that holds them with long answers. So half of each tenant's share of
the rows is guaranteed: a tenant below its guarantee goes before all others, and where nothing can be admitted it gets
rows by preemption from tenants above theirs. Beyond the guarantee nothing is taken back, so that tenants do not preempt
each other in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.arrays import Float64Array, IndexArray
from minisgl_backend.errors import CapacityError
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import WaitingQueue
from minisgl_backend.scheduler.sequence import DEFAULT_LEVEL
from minisgl_backend.scheduler.sequence import Sequence as Answer

MAX_TENANTS = 1024  # told apart at a time; further ones share one counter and have no name
CERTAIN = 0.5  # guaranteed part of a tenant's share of the rows
OTHERS = 0  # number of the shared counter


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Figures of one tenant: sequences, and tokens since the engine started or the tenant was last forgotten."""

    num_running: int
    num_waiting: int
    total_prompt_tokens: int  # computed ones, without cache hits
    total_generated_tokens: int


class FairShares:
    """Each tenant's counter, and the queue ordered by it. Tenants without requests are remembered while there is
    room."""

    def __init__(self, limits: SchedulerLimits, new_queue: Callable[[], WaitingQueue]) -> None:
        """`new_queue`: makes the queue of one tenant's sequences."""
        self.queue = FairQueue(self._ranks, new_queue)
        self._given = dict(limits.tenant_weights)
        self._most_waiting = limits.max_waiting_requests_per_tenant or max(1, limits.max_waiting_requests // 2)
        self._numbers: OrderedDict[str, int] = OrderedDict()  # by name, least recently seen first
        self._free = list(range(MAX_TENANTS - 1, OTHERS, -1))
        self._of_row = np.zeros(limits.max_running_requests, dtype=np.intp)
        self._live = np.zeros(MAX_TENANTS, dtype=np.int64)  # sequences that have not ended
        self._prompt = np.zeros(MAX_TENANTS, dtype=np.int64)
        self._generated = np.zeros(MAX_TENANTS, dtype=np.int64)
        self._admitted = np.full(MAX_TENANTS, -1, dtype=np.int64)  # serial number of the last admission
        self._running = np.zeros(MAX_TENANTS, dtype=np.int64)  # sequences with a row at the beginning of this round
        self._counters = np.zeros(MAX_TENANTS)
        self._weights = np.ones(MAX_TENANTS)
        self._num_held: Callable[[int], int] = lambda number: 0  # of a tenant, outside of the queue
        self._left_at = 0.0  # counter of the tenant that left last

    def enter(self, name: str, count: int) -> int:
        """Returns the number of a tenant, which gets `count` more sequences. Raises CapacityError where it may queue no
        more."""
        number = self._numbers.get(name)
        if number is None:
            number = self._new(name)
        if self._num_waiting(number) >= self._most_waiting:
            raise CapacityError(
                f"{self._most_waiting} requests of this tenant are waiting, all that max_waiting_requests_per_tenant "
                "allows; try again later"
            )
        if number != OTHERS:
            self._numbers.move_to_end(name)
        if not self._live[number]:
            others = np.flatnonzero(self._live)
            lowest = self._counters[others].min() if len(others) else self._left_at
            self._counters[number] = max(self._counters[number], lowest)
        self._live[number] += count
        return number

    def count_held(self, num_held: Callable[[int], int]) -> None:
        """`num_held`: of a tenant's sequences, those that wait outside of the queue."""
        self._num_held = num_held

    def _num_waiting(self, number: int) -> int:
        return self.queue.num_waiting(number) + self._num_held(number)

    def leave(self, number: int) -> None:
        """One of its sequences has ended."""
        self._live[number] -= 1
        if not self._live[number]:
            self._left_at = float(self._counters[number])

    def note_admitted(self, number: int, row: int, num_tokens: int, admission: int) -> None:
        """A sequence has got a row, and `num_tokens` of its prompt will be computed."""
        self._of_row[row] = number
        self._prompt[number] += num_tokens
        self._admitted[number] = admission
        self._running[number] += 1
        self._counters[number] += num_tokens / self._weights[number]

    def note_running(self, active: Sequence[Answer]) -> None:
        """Counts the sequences with a row, at the beginning of a round of admissions."""
        self._running = np.bincount([one.tenant for one in active], minlength=MAX_TENANTS)

    def note_sampled(self, rows: IndexArray | Sequence[int]) -> None:
        """Counts one sampled token of each of these rows."""
        counts = np.bincount(self._of_row[rows], minlength=MAX_TENANTS)
        self._generated += counts
        self._counters += counts / self._weights

    def _ranks(self) -> Callable[[int], tuple[bool, float, int]]:
        """The sort key of a tenant: the lowest goes next, of equals the one that was served longest ago."""
        certain = _certain(self._shares(1))  # counting the sequence to be admitted

        def rank(number: int) -> tuple[bool, float, int]:
            has_share = bool(self._running[number] + 1 > certain[number])
            return has_share, float(self._counters[number]), int(self._admitted[number])

        return rank

    def _shares(self, more: int = 0) -> Float64Array:
        """The rows that each running or waiting tenant is due, out of those in use now and `more`."""
        present = self._running > 0
        present[list(self.queue.waiting())] = True
        weights = np.where(present, self._weights, 0.0)
        return (self._running.sum() + more) * weights / max(weights.sum(), 1e-9)

    def stats(self) -> dict[str, TenantStats]:
        """By name, of tenants that have requests or were served recently."""
        found = {}
        for name, number in (*self._numbers.items(), ("", OTHERS)):
            live, waiting = int(self._live[number]), self._num_waiting(number)
            if number != OTHERS or live or self._generated[number]:
                tokens = int(self._prompt[number]), int(self._generated[number])
                found[name] = TenantStats(max(0, live - waiting), waiting, *tokens)
        return found

    def is_anyone_short(self) -> bool:
        """Whether a waiting tenant is at least one row below its guarantee."""
        waiting = list(self.queue.waiting())
        return bool((_certain(self._shares())[waiting] - self._running[waiting] >= 1).any())

    def victims(self, active: Sequence[Answer]) -> list[Answer]:
        """The sequences to preempt for the tenant that goes next, where it is below its guarantee; `active` are those
        of this round."""
        head = self.queue.head()
        if head is None:
            return []
        counts, shares = self._running.copy(), self._shares()
        room = min(int(_certain(shares)[head.tenant] - counts[head.tenant]), self.queue.num_waiting(head.tenant))
        if room <= 0:
            return []
        by_tenant: dict[int, list[Answer]] = {}  # those not more urgent than the head, least urgent last
        for one in sorted(active, key=lambda one: (one.level, one.admission)):
            if _patience(one) >= _patience(head):
                by_tenant.setdefault(one.tenant, []).append(one)
        found: list[Answer] = []
        while len(found) < room:
            above = [number for number in by_tenant if by_tenant[number] and counts[number] > max(shares[number], 1.0)]
            if not above:
                break
            number = max(above, key=lambda number: float(counts[number] / self._weights[number]))
            found.append(by_tenant[number].pop())
            counts[number] -= 1
        return found

    def _new(self, name: str) -> int:
        if not name:
            return OTHERS
        if not self._free:
            idle = next((one for one, number in self._numbers.items() if not self._live[number]), None)
            if idle is None:
                return OTHERS
            self._free.append(self._numbers.pop(idle))
        number = self._numbers[name] = self._free.pop()
        self._prompt[number] = self._generated[number] = self._counters[number] = 0
        self._admitted[number] = -1
        self._weights[number] = self._given.get(name, 1.0)
        return number


class FairQueue(WaitingQueue):
    """A queue per tenant, each by the configured policy; the tenant with the lowest counter goes first.

    Priorities and preemption order the sequences within one tenant, except for levels below the default one: these
    wait for all tenants' other sequences.
    """

    def __init__(
        self, ranks: Callable[[], Callable[[int], tuple[bool, float, int]]], new_queue: Callable[[], WaitingQueue]
    ) -> None:
        """`ranks` returns the current sort key of tenants; the lowest goes first."""
        super().__init__()
        self._ranks = ranks
        self._new_queue = new_queue
        self._queues: dict[int, WaitingQueue] = {}  # by tenant number; none is empty
        self._num_admissions = 0

    def num_waiting(self, tenant: int) -> int:
        queue = self._queues.get(tenant)
        return 0 if queue is None else len(queue)

    def waiting(self) -> Iterator[int]:
        """The tenants that have waiting sequences."""
        return iter(self._queues)

    def begin_round(self, num_admissions: int) -> None:
        self._num_admissions = num_admissions
        for queue in self._queues.values():
            queue.begin_round(num_admissions)

    def head(self) -> Answer | None:
        heads = [head for queue in self._queues.values() if (head := queue.head()) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        rank = self._ranks()
        return min(heads, key=lambda one: (_patience(one), *rank(one.tenant)))

    def _enter(self, sequence: Answer) -> None:
        queue = self._queues.get(sequence.tenant)
        if queue is None:
            queue = self._queues[sequence.tenant] = self._new_queue()
            queue.push(sequence)
            queue.begin_round(self._num_admissions)
        else:
            queue.push(sequence)

    def _leave(self, sequence: Answer) -> None:
        queue = self._queues[sequence.tenant]
        queue.remove(sequence)
        if not len(queue):
            del self._queues[sequence.tenant]


def _certain(shares: Float64Array) -> Float64Array:
    return np.maximum(CERTAIN * shares, 1.0)


def _patience(sequence: Answer) -> int:
    return max(sequence.level, DEFAULT_LEVEL)
