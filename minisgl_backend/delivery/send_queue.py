"""The order in which one sender thread serves its streams, and when it waits (backpressure).

Urgent items (first tokens, ends, errors, answers that are not streamed) go at once. All others take turns, first come
first served, and only while few responses are in flight to the detokenizer: a response that waits there was made too
early. Tokens that arrive meanwhile go out with their stream's next turn.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from typing import Final, Generic, Protocol, TypeVar

from minisgl_backend.delivery.credits import Credit, StreamCredits

# Responses in flight, by number of streams: FEW / streams, at least WINDOW (more would not make the path faster) and at
# most WINDOW_OF_FEW (few streams cannot queue for long, so their tokens need not gather while the machine is busy).
WINDOW = 4
WINDOW_OF_FEW = 32
FEW = 256
CONFIRM_S = 0.025  # between acknowledgements while few responses are in flight: a burst every 20 ms gets one in two
SLOT_S = 0.025  # an older response no longer counts as in flight: the server silently drops those of cancelled requests


class Served(Protocol):
    """What the queue needs to know of a sequence."""

    @property
    def is_urgent(self) -> bool: ...

    def start_turn(self) -> None: ...


SequenceT = TypeVar("SequenceT", bound=Served)


class SendQueue(Generic[SequenceT]):
    """The queue of one sender thread, which alone calls `next` and `asks_for_ack`; the rest is for any thread.

    Any thread that numbers and sends an acknowledged response of this sender thread holds `sending` meanwhile.
    """

    def __init__(self, credits: StreamCredits, sender: int, window: int = WINDOW) -> None:
        self._credits = credits
        self._sender = sender
        self._window = window
        self.sending: Final = threading.Lock()
        self._arrivals: queue.SimpleQueue[SequenceT | None] = queue.SimpleQueue()
        self._ready: deque[SequenceT] = deque()
        self._confirm_at = 0.0  # time.monotonic()
        self._waiting = False
        self._closing = False

    def fit(self, num_streams: int) -> None:
        """Sets the window for this number of streams."""
        self._window = min(WINDOW_OF_FEW, max(WINDOW, FEW // max(1, num_streams)))

    def open(self, uid: int) -> Credit:
        """The counts of a new sequence that this thread serves."""
        return self._credits.open(uid, self._sender)

    def put(self, sequence: SequenceT) -> None:
        """The sequence has something to send. Called by the sequence itself."""
        self._arrivals.put(sequence)

    def note_acknowledged(self) -> None:
        """A response of this thread has arrived at the detokenizer."""
        if self._waiting:
            self._waiting = False
            self._arrivals.put(None)

    def close(self) -> None:
        """`next` returns None once everything that was put before is served."""
        self._closing = True
        self._arrivals.put(None)

    def asks_for_ack(self) -> bool:
        """Whether the last response has to be acknowledged by itself.

        Not while the window is far from full and others follow at once, or if an acknowledgement was requested just
        before: the next one covers it as well.
        """
        now = self._credits.newest(self._sender)
        is_far_from_full = 2 * self._credits.in_flight(self._sender, now - SLOT_S) < self._window
        if is_far_from_full and (self._ready or not self._arrivals.empty() or now < self._confirm_at):
            return False
        self._confirm_at = now + CONFIRM_S
        return True

    def next(self) -> SequenceT | None:
        """The sequence to serve now; blocks until there is one. None: closed."""
        sequence = self._next()
        if sequence is not None:
            sequence.start_turn()
        return sequence

    def _next(self) -> SequenceT | None:
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

    def _take_arrivals(self, wait_s: float) -> SequenceT | None:
        """Queues arrivals; returns the first urgent one instead. Waits `wait_s` for the first arrival."""
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
        """Seconds until the head of the queue may go if nothing is acknowledged meanwhile; 0: now."""
        if not self._is_full():
            return 0.0
        self._waiting = True
        # An acknowledgement may have come between the two statements above.
        if not self._is_full():
            self._waiting = False
            return 0.0
        return max(0.0, self._credits.oldest(self._sender) + SLOT_S - time.monotonic())

    def _is_full(self) -> bool:
        return self._credits.in_flight(self._sender, time.monotonic() - SLOT_S) >= self._window
