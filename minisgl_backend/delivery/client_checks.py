"""When to ask the server whether a stream's client is still connected.

Times are time.monotonic() seconds.

Only a stream's next chunk can carry the question, which costs a tenth of what a response costs; three tenths where
every wake-up finds a processor asleep, as with few streams. The chunks of few streams come in bursts, one per step, in
which the last one waits for all: so few streams are asked in turn, one in about every other burst. A client whose
departure is noticed late costs no more than one sequence of a small batch. Clients often leave together: once one has
left, all others are asked at once.
"""

from __future__ import annotations

import math

EVERY_S = 0.04  # how often each stream is asked
LATEST_S = 0.075  # the same where asking that often would take more than SHARE of the time
SHARE = 0.25
FEW = 16  # streams
FEW_PAUSE_S = 0.03  # between questions to few streams: longer than their burst and than most steps
FEW_LATEST_S = 0.4  # each of them is asked at least that often
ALARM_S = 0.1  # after a client was found to have left, each stream is asked
ALARM_EVERY_S = 0.02  # this often
AGAIN_S = 1.0  # until a client that has left is asked for again, in case the front did not get the news


class ClientChecks:
    """Used by one thread."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # by uid
        self._pause_until = 0.0
        self._alarm_until = 0.0
        self._next_prune = 0.0

    def __len__(self) -> int:
        """Number of streams with a record."""
        return len(self._asked)

    def is_due(self, uid: int, now: float) -> bool:
        """Whether to ask with the current chunk."""
        waited = now - self._asked.get(uid, -math.inf)
        if now < self._alarm_until:
            return waited >= ALARM_EVERY_S
        in_time = waited >= EVERY_S and now >= self._pause_until
        if self._are_few:
            return waited >= FEW_LATEST_S or (in_time and self._is_first(waited, now))
        return in_time or waited >= LATEST_S

    def note(self, uid: int, started: float, ended: float, *, gone: bool) -> None:
        """The stream was asked between these times; `gone`: its client has left."""
        self._asked[uid] = ended + AGAIN_S if gone else started
        pause = (ended - started) * (1 / SHARE - 1)
        self._pause_until = ended + (max(pause, FEW_PAUSE_S) if self._are_few else pause)
        if gone:
            self._alarm_until = ended + ALARM_S
        if ended >= self._next_prune:
            self._next_prune = ended + AGAIN_S
            # Streams that were not asked for that long are due anyway, or have ended.
            self._asked = {uid: asked for uid, asked in self._asked.items() if ended - asked < AGAIN_S}

    @property
    def _are_few(self) -> bool:
        return len(self._asked) <= FEW

    def _is_first(self, waited: float, now: float) -> bool:
        """Whether no other stream has waited longer; streams that were not asked for too long have ended or are
        silent."""
        return all(now - asked <= waited or now - asked >= FEW_LATEST_S for asked in self._asked.values())
