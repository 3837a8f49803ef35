"""The order in which a sender thread serves its streams: what is urgent at once, the rest in turn and few at a time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from minisgl_backend.delivery import send_queue as queue_module
from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.send_queue import CONFIRM_S, SendQueue
from minisgl_backend.delivery.stream import SequenceStream, Stream
from minisgl_backend.ipc.wire import EngineRequest, OutputOptions
from minisgl_backend.request import FinishReason, SamplingParams
from minisgl_backend.text.vocabulary import Vocabulary
from tests.unit.delivery.fake_engine import PROMPT, Recorder

PATIENCE_S = 20.0
WINDOWS = ((1, 32), (8, 32), (32, 8), (64, 4), (1000, 4))  # of streams, of responses on their way


@pytest.fixture(autouse=True)
def long_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test about old responses waits for them to become old."""
    monkeypatch.setattr(queue_module, "SLOT_S", 1e6)


class Queue(SendQueue[SequenceStream]):
    """With the counts that it reads."""

    def __init__(self, window: int = 4) -> None:
        self.credits = StreamCredits()
        super().__init__(self.credits, 0, window)

    def sequence(self, uid: int, *, sent: bool = True, stream: bool = True, confirmed: bool = True) -> SequenceStream:
        """One that has sent a response or not, a while ago."""
        vocabulary = Vocabulary(lambda ids, skip: "", [b""], frozenset(), byte_exact=True)
        spec = EngineRequest(params=SamplingParams(), options=OutputOptions(stream=stream))
        made = Stream(Recorder(), spec, uid, PROMPT, vocabulary, self, confirmed=confirmed).sequences[0]
        if sent:
            self.credits.number(made.credit)
        return made

    def note_sent(self, sequence: SequenceStream, now: float | None = None) -> None:
        self.credits.send(sequence.credit, time.monotonic() if now is None else now)

    def acknowledge(self, sequence: SequenceStream) -> None:
        """All that it has sent."""
        self.credits.acknowledge([sequence.uid], [sequence.credit.sent], time.monotonic())
        self.note_acknowledged()

    def fill(self, count: int) -> list[SequenceStream]:
        """Sequences with a response on its way."""
        found = [self.sequence(uid) for uid in range(1000, 1000 + count)]
        for one in found:
            self.note_sent(one)
        return found


class Waiter:
    """A thread that asks for the next sequence."""

    def __init__(self, turns: SendQueue) -> None:
        self._turns = turns
        self.found: list[SequenceStream | None] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.found.append(self._turns.next())

    def waits(self) -> bool:
        """A machine that does not let the thread run makes this true as well: only to be asserted."""
        self._thread.join(0.1)
        return self._thread.is_alive()

    def result(self) -> SequenceStream | None:
        self._thread.join(PATIENCE_S)
        return self.found[0]


def test_first_come_first_served() -> None:
    turns = Queue()
    sequences = [turns.sequence(uid) for uid in range(10)]
    for one in sequences:
        turns.put(one)
    assert [turns.next() for _ in sequences] == sequences


@pytest.mark.parametrize("kind", ["first token", "end", "error", "whole answer", "not confirmed"])
def test_what_is_urgent_goes_at_once(kind: str) -> None:
    turns = Queue(window=1)
    turns.fill(1)
    urgent = turns.sequence(7, sent=kind != "first token", stream=kind != "whole answer", confirmed=kind[0] != "n")
    turns.put(turns.sequence(1))
    if kind == "end":
        urgent.append(-1, FinishReason.LENGTH)
    elif kind == "error":
        urgent.stream.fail("INTERNAL", "broken")
    else:
        turns.put(urgent)
    assert turns.next() is urgent
    assert Waiter(turns).waits()


def test_a_confirmation_gives_the_turn() -> None:
    turns = Queue(window=2)
    sent = turns.fill(2)
    ready = turns.sequence(1)
    turns.put(ready)
    waiter = Waiter(turns)
    assert waiter.waits()
    turns.acknowledge(sent[0])
    assert waiter.result() is ready


def test_the_fewer_streams_the_more_responses_on_their_way() -> None:
    for num_streams, expected in WINDOWS:
        turns = Queue()
        turns.fit(num_streams)
        turns.put(turns.sequence(1))
        turns.fill(expected)
        assert Waiter(turns).waits()
        other = Queue()
        other.fit(num_streams)
        other.put(other.sequence(1))
        other.fill(expected - 1)
        assert Waiter(other).result() is not None


def test_what_others_follow_is_confirmed_with_them() -> None:
    turns = Queue(window=6)
    sequences = [turns.sequence(uid) for uid in range(5)]
    for one in sequences:
        turns.put(one)
    asked = []
    for _ in sequences:
        turns.note_sent(turns.next())
        asked.append(turns.asks_for_ack())
    # From the third on the window is half full, and none follows the last.
    assert asked == [False, False, True, True, True]
    other = Queue(window=100)
    other.put(other.sequence(0))
    other.put(other.sequence(1))
    asked = []
    for _ in range(2):
        other.note_sent(other.next())
        asked.append(other.asks_for_ack())
    assert asked == [False, True]


def test_bursts_in_quick_succession_share_a_confirmation() -> None:
    turns = Queue(window=100)
    asked = []
    one = turns.sequence(1)
    for burst in range(6):
        turns.note_sent(one, 1.0 + burst * CONFIRM_S * 0.6)
        asked.append(turns.asks_for_ack())
    assert asked == [True, False, True, False, True, False]


def test_a_full_window_has_asked() -> None:
    for num_streams, window in WINDOWS:
        turns = Queue()
        turns.fit(num_streams)
        asked = False
        busy = turns.sequence(2)
        for _ in range(window + 1):
            turns.put(turns.sequence(1))
        for _ in range(window):
            assert Waiter(turns).result() is not None
            turns.note_sent(busy)
            asked = turns.asks_for_ack()
        assert Waiter(turns).waits()
        assert asked


def test_a_stream_that_ended_holds_nobody_up() -> None:
    turns = Queue(window=1)
    turns.credits.close(turns.fill(1)[0].uid)
    ready = turns.sequence(1)
    turns.put(ready)
    assert turns.next() is ready


def test_a_response_that_is_never_confirmed_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "SLOT_S", 0.05)
    turns = Queue(window=1)
    turns.fill(1)
    ready = turns.sequence(1)
    turns.put(ready)
    assert Waiter(turns).result() is ready


def test_closing_serves_what_was_put_before() -> None:
    turns = Queue(window=1)
    turns.fill(1)
    ready = [turns.sequence(1), turns.sequence(2)]
    for one in ready:
        turns.put(one)
    turns.close()
    assert [turns.next() for _ in range(3)] == [*ready, None]
    waiter = Waiter(other := Queue())
    other.close()
    assert waiter.result() is None


def test_every_put_is_served_once_under_races() -> None:
    turns = Queue(window=2)
    counts = np.zeros(50, dtype=int)
    sequences = [turns.sequence(uid) for uid in range(50)]
    served: list[SequenceStream] = []

    def serve() -> None:
        while (one := turns.next()) is not None:
            counts[one.uid] += 1
            turns.note_sent(one)
            served.append(one)

    def confirm() -> None:
        done = 0
        while done < 50 * 40:
            while done < len(served):
                turns.acknowledge(served[done])
                done += 1
            time.sleep(0)

    threads = [threading.Thread(target=target, daemon=True) for target in (serve, confirm)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        for one in sequences:
            turns.put(one)
    threads[1].join(PATIENCE_S)
    turns.close()
    threads[0].join(PATIENCE_S)
    assert counts.tolist() == [40] * 50
