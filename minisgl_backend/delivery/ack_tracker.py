"""Which streams are gone: compares what a front sent with what the detokenizer says it has handled.

A server may drop the queued responses of a cancelled request without a word. What still tells is order: responses of
one sender are handled in the order they were sent, so a response that is still unconfirmed when later ones of the same
sender are confirmed was dropped, and so is one that stays unconfirmed while the detokenizer is idle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence


class _Sender:
    """Positions count the responses of one sender over all its streams."""

    __slots__ = ("confirmed", "heard", "sent")

    def __init__(self, now: float) -> None:
        self.sent = 0
        self.confirmed = -1  # the highest position that was confirmed
        self.heard = now  # when


class _Stream:
    __slots__ = ("gap_position", "gap_since", "sender", "waiting")

    def __init__(self, sender: _Sender) -> None:
        self.sender = sender
        self.waiting: deque[tuple[int, int, float]] = deque()  # sequence number, position, time; unconfirmed ones
        self.gap_position = -1
        self.gap_since = 0.0


class AckTracker:
    """Sent and confirmed counts of each stream; thread-safe.

    Sequence numbers count the responses of a stream and grow with each one; `sender` is the thread that sends the
    stream, always the same one for a stream. Times are time.monotonic() seconds.
    """

    def __init__(self, *, gap_grace_s: float = 0.02, silence_s: float = 0.6) -> None:
        """A gap counts once it is `gap_grace_s` old, silence after `silence_s`."""
        self._gap_grace_s = gap_grace_s
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self._senders: dict[int, _Sender] = {}
        self._last_expire = 0.0
        self._num_waiting = 0

    def on_sent(self, uid: int, sequence_number: int, now: float, sender: int = 0) -> None:
        """Call just before the send itself, so that a confirmation never overtakes it."""
        with self._lock:
            stream = self._streams.get(uid)
            if stream is None:
                owner = self._senders.get(sender)
                if owner is None:
                    owner = self._senders[sender] = _Sender(now)
                stream = self._streams[uid] = _Stream(owner)
            stream.waiting.append((sequence_number, stream.sender.sent, now))
            stream.sender.sent += 1
            self._num_waiting += 1

    def on_handled(self, uids: Sequence[int], sequence_numbers: Sequence[int], now: float) -> list[int]:
        """Counts one message of the detokenizer. Number -1 says that it saw the stream cancelled.

        Returns the streams that it saw cancelled; they are forgotten.
        """
        gone = []
        with self._lock:
            for uid, number in zip(uids, sequence_numbers, strict=True):
                stream = self._streams.get(uid)
                if stream is None:
                    continue
                sender = stream.sender
                sender.heard = now
                if number < 0:
                    gone.append(uid)
                    self._forget(uid)
                    continue
                waiting = stream.waiting
                while waiting and waiting[0][0] <= number:
                    sender.confirmed = max(sender.confirmed, waiting.popleft()[1])
                    self._num_waiting -= 1
        return gone

    def expire(self, now: float) -> list[int]:
        """The streams that are gone by now, each reported once and then forgotten; call every 10 to 50 ms."""
        with self._lock:
            if now - self._last_expire > self._silence_s / 2:
                # This process itself was stopped or starved: what it did not hear proves nothing.
                for sender in self._senders.values():
                    sender.heard = now
            self._last_expire = now
            gone = [uid for uid, stream in self._streams.items() if self._is_gone(stream, now)]
            for uid in gone:
                self._forget(uid)
            return gone

    def _is_gone(self, stream: _Stream, now: float) -> bool:
        if not stream.waiting:
            return False
        _, position, sent_at = stream.waiting[0]
        if position >= stream.sender.confirmed:
            return min(now - sent_at, now - stream.sender.heard) > self._silence_s
        if stream.gap_position != position:
            stream.gap_position, stream.gap_since = position, now
            return False
        return now - stream.gap_since >= self._gap_grace_s

    def unconfirmed(self, uid: int) -> int:
        """Responses of the stream that lie between front and detokenizer; 0 for an unknown one."""
        with self._lock:
            stream = self._streams.get(uid)
            return len(stream.waiting) if stream is not None else 0

    def total_unconfirmed(self) -> int:
        """The same over all streams."""
        return self._num_waiting

    def forget(self, uid: int) -> None:
        """The stream's last response was sent, or the stream failed: whatever comes is of no interest."""
        with self._lock:
            self._forget(uid)

    def _forget(self, uid: int) -> None:
        stream = self._streams.pop(uid, None)
        if stream is not None:
            self._num_waiting -= len(stream.waiting)

    def clear(self) -> None:
        """Forgets every stream."""
        with self._lock:
            self._streams.clear()
            self._num_waiting = 0
