"""The order in which waiting sequences are admitted.

Two rules precede every policy: a more urgent level goes first, and within a level a preempted sequence goes before
those that never ran. A new policy is a subclass of WaitingQueue and a row of `QUEUES`.
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Callable, Iterator, Mapping

from minisgl_backend.scheduler.sequence import Sequence, SequenceState

# Longest-prefix-first (LPM) considers only the oldest LPM_WINDOW waiting sequences of a round, since it looks each one
# up in the radix tree, and lets no sequence be overtaken by more than LPM_PATIENCE admissions.
LPM_WINDOW = 128
LPM_PATIENCE = 512


class WaitingQueue(abc.ABC):
    """A queue of sequences in state WAITING."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}  # by uid, in order of arrival in the queue
        self.num_tokens = 0  # of all members
        self.num_background_tokens = 0  # of members below the default priority
        self.version = 0  # incremented whenever a member comes or goes

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_other_tokens(self) -> int:
        """Tokens of members that are not background requests."""
        return self.num_tokens - self.num_background_tokens

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def push(self, sequence: Sequence) -> None:
        self._members[sequence.uid] = sequence
        self.num_tokens += len(sequence.token_ids)
        self.num_background_tokens += sequence.is_background * len(sequence.token_ids)
        self.version += 1
        self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._members[sequence.uid]
        self.num_tokens -= len(sequence.token_ids)
        self.num_background_tokens -= sequence.is_background * len(sequence.token_ids)
        self.version += 1
        self._leave(sequence)

    @abc.abstractmethod
    def begin_round(self, num_admissions: int) -> None:
        """Called before a step admits; `num_admissions` counts all admissions since start."""

    @abc.abstractmethod
    def head(self) -> Sequence | None:
        """The sequence to admit next."""

    @abc.abstractmethod
    def _enter(self, sequence: Sequence) -> None: ...

    @abc.abstractmethod
    def _leave(self, sequence: Sequence) -> None: ...


class FirstComeFirstServed(WaitingQueue):
    """In order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, bool, int, int, Sequence]] = []

    def begin_round(self, num_admissions: int) -> None:
        pass

    def head(self) -> Sequence | None:
        while self._heap and self._members.get(self._heap[0][-1].uid) is not self._heap[0][-1]:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def _enter(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*_urgency(sequence), sequence.arrival, sequence.uid, sequence))

    def _leave(self, sequence: Sequence) -> None:
        if self._heap[0][-1] is sequence:
            heapq.heappop(self._heap)


class LongestPrefixFirst(WaitingQueue):
    """Longest cached prefix first; equals in order of arrival.

    Sequences that share a prefix run together, before the prefix is evicted. LPM_WINDOW bounds the work, LPM_PATIENCE
    the waiting.
    """

    def __init__(self, cached_tokens: Callable[[Sequence], int]) -> None:
        super().__init__()
        self._cached_tokens = cached_tokens
        self._round: list[Sequence] = []  # the last one is admitted next
        self._num_admissions = 0

    def begin_round(self, num_admissions: int) -> None:
        self._num_admissions = num_admissions
        oldest = heapq.nsmallest(LPM_WINDOW, self, key=lambda one: (*_urgency(one), one.arrival, one.uid))
        self._round = sorted(oldest, key=self._rank, reverse=True)

    def head(self) -> Sequence | None:
        while self._round and self._round[-1].state is not SequenceState.WAITING:
            self._round.pop()
        return self._round[-1] if self._round else None

    def _enter(self, sequence: Sequence) -> None:
        pass

    def _leave(self, sequence: Sequence) -> None:
        if self._round and self._round[-1] is sequence:
            self._round.pop()

    def _rank(self, sequence: Sequence) -> tuple[int, bool, bool, int, int, int]:
        patient = self._num_admissions - sequence.admissions_before <= LPM_PATIENCE
        cached = self._cached_tokens(sequence) if patient else 0
        return (*_urgency(sequence), patient, -cached, sequence.arrival, sequence.uid)


def _urgency(sequence: Sequence) -> tuple[int, bool]:
    return sequence.level, not sequence.resumed


# By the values of the option schedule_policy; each gets a function that returns a sequence's cached tokens.
QUEUES: Mapping[str, Callable[[Callable[[Sequence], int]], WaitingQueue]] = {
    "fcfs": lambda cached_tokens: FirstComeFirstServed(),
    "lpm": LongestPrefixFirst,
}
