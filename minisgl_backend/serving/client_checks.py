"""When to ask the server whether a stream's client is still there.

Knows nothing of Triton or of chunks. Times are time.monotonic() seconds.

Only a stream's next chunk can be asked, and the question costs a tenth of what a response costs. Clients often leave
together: where one was found gone, the others are asked at once.
"""

from __future__ import annotations

import math

EVERY_S = 0.04  # how often each stream is asked
LATEST_S = 0.075  # the same where asking that often would take more than SHARE of the time
SHARE = 0.25
ALARM_S = 0.1  # after a client was found gone, each stream is asked
ALARM_EVERY_S = 0.02  # this often
AGAIN_S = 1.0  # until a client that was found gone is asked for again, should nobody have heard of it


class ClientChecks:
    """Used by one thread."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}  # by uid
        self._pause_until = 0.0
        self._alarm_until = 0.0
        self._next_prune = 0.0

    def __len__(self) -> int:
        """Streams that are remembered."""
        return len(self._asked)

    def is_due(self, uid: int, now: float) -> bool:
        """Whether to ask with the chunk at hand."""
        if now < self._alarm_until:
            interval = ALARM_EVERY_S
        else:
            interval = EVERY_S if now >= self._pause_until else LATEST_S
        return now - self._asked.get(uid, -math.inf) >= interval

    def note(self, uid: int, started: float, ended: float, *, gone: bool) -> None:
        """The stream was asked between these times; `gone`: its client has left."""
        self._asked[uid] = ended + AGAIN_S if gone else started
        self._pause_until = ended + (ended - started) * (1 / SHARE - 1)
        if gone:
            self._alarm_until = ended + ALARM_S
        if ended >= self._next_prune:
            self._next_prune = ended + AGAIN_S
            # Those that were not asked for so long are due anyway, or have ended.
            self._asked = {uid: asked for uid, asked in self._asked.items() if ended - asked < AGAIN_S}
