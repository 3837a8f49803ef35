"""Credits: how many responses of each stream were sent and acknowledged, which allows more, and shows which are lost.

The only owner of these counts. Three things follow from them:

* Backpressure: a sender thread sends only while few of its responses are in flight to the detokenizer (`in_flight`).
* Which streams are gone. A server may silently drop the queued responses of a cancelled request. Order reveals it: the
  responses of one sender are handled in the order of sending, so one that is unacknowledged when later ones of that
  sender are acknowledged was dropped, and so was one that stays so while the detokenizer is idle.
* Whether anything is in flight at all, so that silence is worth a probe (`num_in_flight`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Sender:
    """One sender thread. Positions count its responses over all its streams."""

    sent: int = 0
    acknowledged: int = -1  # the highest acknowledged position
    heard: float | None = None  # time of that; None: nothing was sent yet
    in_flight: deque[tuple[Credit, int, float]] = field(
        default_factory=deque
    )  # number and time; used by the thread only


@dataclass(eq=False, slots=True)
class Credit:
    """One stream's counts. Only its StreamCredits writes them; any thread may read them."""

    uid: int
    _sender: _Sender
    sent: int = 0  # number of responses; they are numbered from 1
    acknowledged: int = 0  # the highest number that the detokenizer has handled
    closed: bool = False
    _waiting: deque[tuple[int, int, float]] = field(
        default_factory=deque
    )  # number, position, time; unacknowledged ones
    _gap_position: int = -1
    _gap_since: float = 0.0


class StreamCredits:
    """All streams of one front; thread-safe. Times are time.monotonic() seconds."""

    def __init__(self, num_senders: int = 1, *, gap_grace_s: float = 0.02, silence_s: float = 0.6) -> None:
        """A gap counts once it is `gap_grace_s` old, silence after `silence_s`."""
        self._gap_grace_s = gap_grace_s
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._credits: dict[int, Credit] = {}  # by uid
        self._senders = [_Sender() for _ in range(num_senders)]
        self._last_expire = 0.0
        self.num_in_flight = 0  # responses of all streams

    def open(self, uid: int, sender: int) -> Credit:
        """Opens a stream for the sender thread `sender`, which never changes."""
        credit = Credit(uid, self._senders[sender])
        with self._lock:
            self._credits[uid] = credit
        return credit

    def number(self, credit: Credit) -> int:
        """The number of the stream's next response, for one that is not acknowledged."""
        credit.sent += 1
        return credit.sent

    def send(self, credit: Credit, now: float) -> int:
        """The number of the next response, for one that is acknowledged. To be called just before sending, on the
        sender's thread or with its lock, so that neither an acknowledgement nor another response overtakes it."""
        sender = credit._sender
        with self._lock:
            credit.sent += 1
            if sender.heard is None:
                sender.heard = now
            credit._waiting.append((credit.sent, sender.sent, now))
            sender.sent += 1
            self.num_in_flight += 1
        sender.in_flight.append((credit, credit.sent, now))
        return credit.sent

    def in_flight(self, sender: int, sent_after: float) -> int:
        """Number of a sender thread's responses in flight to the detokenizer; called by that thread only.

        Responses sent before `sent_after` do not count: the server silently drops those of cancelled requests.
        """
        on_their_way = self._senders[sender].in_flight
        while on_their_way:
            credit, number, sent_at = on_their_way[0]
            if credit.acknowledged < number and not credit.closed and sent_at > sent_after:
                break
            on_their_way.popleft()
        return len(on_their_way)

    def oldest(self, sender: int) -> float:
        """Time at which the first of them was sent."""
        return self._senders[sender].in_flight[0][2]

    def newest(self, sender: int) -> float:
        """Time at which the last of them was sent."""
        return self._senders[sender].in_flight[-1][2]

    def acknowledge(self, uids: Sequence[int], numbers: Sequence[int], now: float) -> list[int]:
        """Counts one message of the detokenizer. Number -1: it found the stream cancelled.

        Returns the streams that it found cancelled; none of their responses is in flight any more.
        """
        gone = []
        with self._lock:
            for uid, number in zip(uids, numbers, strict=True):
                credit = self._credits.get(uid)
                if credit is None:
                    continue
                sender = credit._sender
                sender.heard = now
                if number < 0:
                    gone.append(uid)
                    self._drop(credit)
                    continue
                credit.acknowledged = max(credit.acknowledged, number)
                waiting = credit._waiting
                while waiting and waiting[0][0] <= number:
                    sender.acknowledged = max(sender.acknowledged, waiting.popleft()[1])
                    self.num_in_flight -= 1
        return gone

    def expire(self, now: float) -> list[int]:
        """Returns the streams found lost by now, each once; to be called every 10 to 50 ms."""
        with self._lock:
            if now - self._last_expire > self._silence_s / 2:
                # This process itself was stopped or starved: that it received nothing proves nothing.
                for sender in self._senders:
                    sender.heard = now
            self._last_expire = now
            gone = [credit for credit in self._credits.values() if self._is_gone(credit, now)]
            for credit in gone:
                self._drop(credit)
            return [credit.uid for credit in gone]

    def _is_gone(self, credit: Credit, now: float) -> bool:
        if not credit._waiting:
            return False
        _, position, sent_at = credit._waiting[0]
        sender = credit._sender
        if position >= sender.acknowledged:
            heard = sent_at if sender.heard is None else sender.heard
            return min(now - sent_at, now - heard) > self._silence_s
        if credit._gap_position != position:
            credit._gap_position, credit._gap_since = position, now
            return False
        return now - credit._gap_since >= self._gap_grace_s

    def close(self, uid: int) -> None:
        """The stream's last response was sent, or the stream failed: later acknowledgements are ignored."""
        with self._lock:
            credit = self._credits.pop(uid, None)
            if credit is not None:
                credit.closed = True
                self._drop(credit)

    def drop(self, uids: Iterable[int]) -> None:
        """Ignores all unacknowledged responses of these streams."""
        with self._lock:
            for uid in uids:
                if (credit := self._credits.get(uid)) is not None:
                    self._drop(credit)

    def _drop(self, credit: Credit) -> None:
        self.num_in_flight -= len(credit._waiting)
        credit._waiting.clear()
