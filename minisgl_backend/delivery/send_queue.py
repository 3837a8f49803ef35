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

from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.stream import SequenceStream

# Responses on their way, by number of streams: FEW / streams, at least WINDOW (more do not make the path faster) and at
# most WINDOW_OF_FEW (few streams cannot queue for long: theirs need not gather while the machine is busy elsewhere).
WINDOW = 4
WINDOW_OF_FEW = 32
FEW = 256
CONFIRM_S = 0.025  # between confirmations while little is on its way: a burst of few streams every 20 ms has one in two
SLOT_S = 0.025  # a response that is this old holds nobody up: the server drops those of cancelled requests unseen


class SendQueue:
    """Of one sender thread, which alone calls `next`, `asks_for_ack` and `block`; the rest is for any thread.

    Writes `queued` and `blocked` of sequences, and nobody else does.
    """

    def __init__(self, credits: StreamCredits, sender: int, window: int = WINDOW) -> None:
        self._credits = credits
        self._sender = sender
        self._window = window
        self._arrivals: queue.SimpleQueue[SequenceStream | None] = queue.SimpleQueue()
        self._ready: deque[SequenceStream] = deque()
        self._confirm_at = 0.0  # time.monotonic()
        self._waiting = False
        self._closing = False

    def fit(self, num_streams: int) -> None:
        """Chooses the window for this many streams."""
        self._window = min(WINDOW_OF_FEW, max(WINDOW, FEW // max(1, num_streams)))

    def put(self, sequence: SequenceStream) -> None:
        """It has something to send."""
        sequence.queued = True
        self._arrivals.put(sequence)

    def block(self, sequence: SequenceStream) -> None:
        """Its next response waits for an acknowledgement of one before."""
        sequence.blocked = True

    def unblock(self, sequence: SequenceStream) -> bool:
        """Whether it was blocked; no longer now."""
        was_blocked, sequence.blocked = sequence.blocked, False
        return was_blocked

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
        """Whether the response that was sent last has to be acknowledged by itself.

        Not while the window is far from full and others follow at once, or one was asked for just before: the next
        one acknowledges it as well.
        """
        now = self._credits.newest(self._sender)
        is_far_from_full = 2 * self._credits.in_flight(self._sender, now - SLOT_S) < self._window
        if is_far_from_full and (self._ready or not self._arrivals.empty() or now < self._confirm_at):
            return False
        self._confirm_at = now + CONFIRM_S
        return True

    def next(self) -> SequenceStream | None:
        """The sequence to serve now; blocks until there is one. None: closed."""
        sequence = self._next()
        if sequence is not None:
            # Before its tokens are taken: whoever appends after this puts it again.
            sequence.queued = False
        return sequence

    def _next(self) -> SequenceStream | None:
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
        return max(0.0, self._credits.oldest(self._sender) + SLOT_S - time.monotonic())

    def _is_full(self) -> bool:
        return self._credits.in_flight(self._sender, time.monotonic() - SLOT_S) >= self._window
