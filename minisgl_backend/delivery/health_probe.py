"""Probes the detokenizer while responses are unacknowledged and nothing else would bring an acknowledgement.

A probe is an empty chunk after all chunks sent so far. Its acknowledgement proves that earlier chunks that are still
unacknowledged were dropped: the server silently discards the queued responses of a cancelled request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from minisgl_backend.delivery.credits import Credit, StreamCredits
from minisgl_backend.ipc.wire import Chunk

PROBE_AFTER_S = 0.03  # of silence while something is unacknowledged
CHECK_EVERY_S = 0.015

_LOGGER = logging.getLogger(__name__)


class HealthProbe:
    """A thread that sends probes, one at a time for each sender thread (worker).

    `probe(chunk)` returns when the detokenizer has handled the chunk, or failed to. `is_silent(now)`: something is
    unacknowledged, and nothing was sent or heard for PROBE_AFTER_S. `credits` numbers probes, too. `sending`: the locks
    that workers hold while they number and send a response.
    """

    def __init__(
        self,
        *,
        probe: Callable[[Chunk], None],
        is_silent: Callable[[float], bool],
        credits: StreamCredits,
        sending: Sequence[threading.Lock],
    ) -> None:
        self._probe = probe
        self._is_silent = is_silent
        self._credits = credits
        self._sending = sending
        self._own: list[Credit] = []  # by worker
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, uids: Sequence[int]) -> None:
        """`uids`: one for each worker's probes."""
        self._own = [self._credits.open(uid, worker) for worker, uid in enumerate(uids)]
        self.restart()

    def restart(self) -> None:
        """Abandons the thread whose probe a dead detokenizer does not answer: the server lets it wait."""
        self._thread = threading.Thread(target=self._run, name="health-probe", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(CHECK_EVERY_S) and self._thread is threading.current_thread():
            try:
                if self._is_silent(time.monotonic()):
                    self._probe_all()
            except Exception:  # the thread must go on: without it cancelled requests run to their end
                _LOGGER.exception("a probe of the detokenizer failed; the next one follows")

    def _probe_all(self) -> None:
        for chunk in [self._next_probe(worker, credit) for worker, credit in enumerate(self._own)]:
            if chunk is not None:
                self._probe(chunk)

    def _next_probe(self, worker: int, credit: Credit) -> Chunk | None:
        """A probe, numbered in the order of what the worker sends; None while the worker is sending."""
        # A response that is numbered but not yet sent would look dropped if the probe overtook it.
        lock = self._sending[worker]
        if not lock.acquire(blocking=False):
            return None
        try:
            return Chunk(uid=credit.uid, number=self._credits.send(credit, time.monotonic()))
        finally:
            lock.release()
