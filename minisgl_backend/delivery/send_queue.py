"""Whose turn it is: the order in which one sender thread serves its streams, and when it waits.

What is urgent (first tokens, ends, errors, answers that are no stream) goes at once. All else takes turns, first come
first served, and only while few responses lie between this thread and the detokenizer: what lies there only waits, in a
response that was made too early. Tokens that come meanwhile go out with their stream's next turn.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque

from minisgl_backend.delivery.stream import SequenceStream

WINDOW = 4  # responses on their way; more do not make the path faster, but
WINDOW_OF_FEW = 32  # few streams cannot queue for long: theirs need not gather while the machine is busy elsewhere
FEW = 256  # window times streams, between the two
CONFIRM_S = 0.025  # between confirmations while little is on its way: a burst of few streams every 20 ms has one in two
SLOT_S = 0.025  # a response that is this old holds nobody up: the server drops those of cancelled requests unseen


class SendQueue:
    """Of one sender thread, which alone calls `next` and `note_sent`; the rest may be called from any thread."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._arrivals: queue.SimpleQueue[SequenceStream | None] = queue.SimpleQueue()
        self._ready: deque[SequenceStream] = deque()
        self._sent: deque[tuple[SequenceStream, int, float]] = deque()  # those on their way: number, time
        self._confirm_at = 0.0  # time.monotonic()
        self._waiting = False
        self._closing = False

    def fit(self, num_streams: int) -> None:
        """Chooses the window for this many streams."""
        self._window = min(WINDOW_OF_FEW, max(WINDOW, FEW // max(1, num_streams)))

    def put(self, sequence: SequenceStream) -> None:
        """It has something to send."""
        self._arrivals.put(sequence)

    def note_confirmed(self) -> None:
        """A response of this thread has arrived at the detokenizer."""
        if self._waiting:
            self._waiting = False
            self._arrivals.put(None)

    def close(self) -> None:
        """`next` returns None once everything that was put before is served."""
        self._closing = True
        self._arrivals.put(None)

    def note_sent(self, sequence: SequenceStream, number: int, now: float) -> None:
        """Its response `number` is on its way; time.monotonic() seconds."""
        self._sent.append((sequence, number, now))

    def needs_confirmation(self) -> bool:
        """Whether the response that was noted last has to be confirmed by itself.

        Not while the window is far from full and others follow at once, or a confirmation was asked for just before:
        the next one confirms it as well.
        """
        now = self._sent[-1][2]
        if 2 * len(self._sent) < self._window and (self._ready or not self._arrivals.empty() or now < self._confirm_at):
            return False
        self._confirm_at = now + CONFIRM_S
        return True

    def next(self) -> SequenceStream | None:
        """The sequence to serve now; blocks until there is one. None: closed."""
        wait_s = 0.0
        while True:
            urgent = self._take_arrivals(wait_s)
            if urgent is not None:
                return urgent
            wait_s = self._time_to_turn() if self._ready else math.inf
            if wait_s <= 0:
                return self._ready.popleft()
            if self._closing:  # once more, for what was put just before
                return self._take_arrivals(0.0) or (self._ready.popleft() if self._ready else None)

    def _take_arrivals(self, wait_s: float) -> SequenceStream | None:
        """Lines up what has come; the first urgent one is returned instead. Waits `wait_s` for the first arrival."""
        arrivals, ready = self._arrivals, self._ready
        try:
            arrived = arrivals.get_nowait() if wait_s <= 0 else arrivals.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
            while True:
                if arrived is not None:
                    if arrived.is_urgent:
                        return arrived
                    ready.append(arrived)
                arrived = arrivals.get_nowait()
        except queue.Empty:
            return None

    def _time_to_turn(self) -> float:
        """Seconds until the first in line may go if nothing is confirmed meanwhile; 0: now."""
        if not self._is_full():
            return 0.0
        self._waiting = True
        # A confirmation may have come between the two lines above.
        if not self._is_full():
            self._waiting = False
            return 0.0
        return max(0.0, self._sent[0][2] + SLOT_S - time.monotonic())

    def _is_full(self) -> bool:
        sent = self._sent
        too_old = time.monotonic() - SLOT_S
        while sent:
            sequence, number, moment = sent[0]
            if sequence.confirmed_number < number and not sequence.stream.closed and moment > too_old:
                break
            sent.popleft()
        return len(sent) >= self._window
