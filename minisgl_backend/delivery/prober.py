"""Asks the detokenizer for a sign while something is unconfirmed and nothing else would bring one.

A probe is an empty chunk behind everything sent so far; its confirmation proves that whatever was sent before and is
still unconfirmed was dropped: the server throws the queued responses of a cancelled request away without a word.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from minisgl_backend.delivery.credits import Credit, StreamCredits
from minisgl_backend.ipc.wire import Chunk

PROBE_AFTER_S = 0.03  # of silence while something is unconfirmed
CHECK_EVERY_S = 0.015

_LOGGER = logging.getLogger(__name__)


class Prober:
    """A thread that sends probes, one a sender thread (worker) at a time.

    `probe(chunk)` returns when the detokenizer has handled the chunk, or failed to; `is_silent(now)` says whether
    something is unconfirmed and nothing was sent or heard for PROBE_AFTER_S; `credits` numbers probes too; `sending`
    are the locks that workers hold while they number and send a response.
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
        """`uids`: one of its own for each worker's probes."""
        self._own = [self._credits.open(uid, worker) for worker, uid in enumerate(uids)]
        self.restart()

    def restart(self) -> None:
        """Leaves behind the thread whose probe a dead detokenizer does not answer: the server lets it wait."""
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
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
            except Exception:  # the thread must live: without it cancelled requests run to their end
                _LOGGER.exception("a probe of the detokenizer failed; the next one follows")

    def _probe_all(self) -> None:
        for chunk in [self._take_place(worker, credit) for worker, credit in enumerate(self._own)]:
            if chunk is not None:
                self._probe(chunk)

    def _take_place(self, worker: int, credit: Credit) -> Chunk | None:
        """A probe with its place in the order of what the worker sends; None while the worker is sending."""
        # A response that is numbered but not yet handed over would look dropped if the probe overtook it.
        lock = self._sending[worker]
        if not lock.acquire(blocking=False):
            return None
        try:
            return Chunk(uid=credit.uid, number=self._credits.send(credit, time.monotonic()))
        finally:
            lock.release()
