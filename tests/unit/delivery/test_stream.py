"""The verbs of a stream: what gives its sender thread a turn, and that nothing is lost between the threads."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from minisgl_backend.delivery.credits import StreamCredits
from minisgl_backend.delivery.send_queue import SendQueue
from minisgl_backend.delivery.stream import SequenceStream, Stream, append_outputs, streams_of
from minisgl_backend.ipc.messages import Outputs
from minisgl_backend.ipc.wire import EngineRequest, OutputOptions
from minisgl_backend.request import FinishReason, SamplingParams
from minisgl_backend.step import SequenceDetail
from minisgl_backend.text.vocabulary import Vocabulary
from tests.unit.delivery.fake_engine import PROMPT, Recorder

LENGTH = int(FinishReason.LENGTH)


class Turns(SendQueue[SequenceStream]):
    """Keeps what is put, and puts it."""

    def __init__(self) -> None:
        self.credits = StreamCredits()
        super().__init__(self.credits, 0)
        self.lined_up: list[int] = []

    def put(self, sequence: SequenceStream) -> None:
        self.lined_up.append(sequence.uid)
        super().put(sequence)

    def stream(self, *, n: int = 1, stream: bool = True, stop: tuple[str, ...] = ()) -> Stream:
        table = [bytes([i]) for i in range(256)]
        vocabulary = Vocabulary(lambda ids, skip: bytes(ids).decode(), table, frozenset(), byte_exact=True)
        spec = EngineRequest(params=SamplingParams(n=n, stop=stop), options=OutputOptions(stream=stream))
        return Stream(Recorder(), spec, 7, PROMPT, vocabulary, self, confirmed=True)

    def acknowledge(self, sequence: SequenceStream) -> None:
        self.credits.acknowledge([sequence.uid], [sequence.credit.sent], time.monotonic())
        sequence.note_acknowledged()


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def outputs(*records: tuple[int, int, int], details: dict[int, SequenceDetail] | None = None) -> Outputs:
    uids, tokens, reasons = zip(*records, strict=True)
    return Outputs(
        uids=np.array(uids, dtype="<i8").tobytes(),
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        reasons=bytes(reasons),
        details=details or {},
    )


def test_tokens_share_a_turn_and_an_end_takes_its_own(turns: Turns) -> None:
    (sequence,) = turns.stream().sequences
    known = {7: sequence}
    append_outputs(known, outputs((7, 65, 0), (8, 66, 0)))
    append_outputs(known, outputs((7, 67, 0)))
    assert turns.lined_up == [7]
    assert turns.next() is sequence
    sequence.append(68)
    assert turns.lined_up == [7, 7], "its turn has begun"
    sequence.append(69, LENGTH)
    assert turns.lined_up == [7, 7, 7]
    sequence.gather()
    delta = sequence.take()
    assert np.frombuffer(delta.part.token_ids, dtype="<i4").tolist() == [65, 67, 68, 69]
    assert delta.part.is_last
    assert sequence.finished
    assert sequence.stream.is_complete


def test_the_last_token_is_never_seen_without_its_reason(turns: Turns) -> None:
    """As a token like others, a stop token would become text."""
    (sequence,) = turns.stream().sequences
    seen = []

    class Pending(list[int]):
        def append(self, token: int) -> None:
            super().append(token)
            seen.append(sequence.gather())  # the receive thread loses its turn behind this line

    sequence._pending = Pending()
    sequence.append(65)
    sequence.append(66, int(FinishReason.STOP))
    seen.append(sequence.gather())
    assert [delta.part.ends_with_stop_token for delta in seen if delta] == [False, True]
    assert b"".join(delta.part.token_ids for delta in seen if delta) == np.array([65, 66], dtype="<i4").tobytes()


def test_what_is_answered_at_once_takes_one_turn(turns: Turns) -> None:
    stream = turns.stream(stream=False, n=2)
    known = {sequence.uid: sequence for sequence in stream.sequences}
    assert streams_of(known) == [stream]
    append_outputs(known, outputs((7, 65, 0), (8, 66, 0)))
    assert turns.lined_up == []
    append_outputs(known, outputs((7, 67, LENGTH)))
    stream.sequences[0].gather()
    assert not stream.is_complete
    append_outputs(known, outputs((8, 68, LENGTH)))
    stream.sequences[1].gather()
    assert stream.is_complete
    assert turns.lined_up == [7, 8]


def test_what_is_gathered_is_taken_as_one(turns: Turns) -> None:
    (sequence,) = turns.stream(stop=("xyz",)).sequences
    texts = []
    for token in b"axyb":
        sequence.append(token)
        delta = sequence.gather()
        assert delta is not None
        texts.append(delta.part.text)
    assert texts == ["a", "", "", "xyb"]
    taken = sequence.take()
    assert taken.part.text == "axyb"
    assert taken.num_tokens == 4
    assert sequence.gather() is None


def test_an_acknowledgement_lines_up_what_waits_for_it(turns: Turns) -> None:
    (sequence,) = turns.stream().sequences
    turns.credits.send(sequence.credit, time.monotonic())
    assert not sequence.must_wait(2)
    turns.acknowledge(sequence)
    assert turns.lined_up == [], "nothing waited"
    turns.credits.send(sequence.credit, time.monotonic())
    assert sequence.must_wait(1)
    turns.acknowledge(sequence)
    assert turns.lined_up == [7]
    turns.acknowledge(sequence)
    assert turns.lined_up == [7]


def test_an_acknowledgement_while_it_begins_to_wait(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    (sequence,) = turns.stream().sequences
    counts = iter([1, 0])
    monkeypatch.setattr(SequenceStream, "num_unacknowledged", property(lambda _: next(counts)))
    assert not sequence.must_wait(1)
    sequence.note_acknowledged()
    assert turns.lined_up == []


def test_a_failure_is_urgent_and_the_first_sequence_takes_its_turn(turns: Turns) -> None:
    stream = turns.stream(n=2)
    for sequence in stream.sequences:
        turns.credits.number(sequence.credit)
    assert not any(sequence.is_urgent for sequence in stream.sequences)
    stream.fail("INTERNAL", "broken")
    assert turns.lined_up == [7]
    assert stream.failure == ("INTERNAL", "broken")
    assert all(sequence.is_urgent for sequence in stream.sequences)
    stream.abandon()
    assert not any(sequence.is_urgent for sequence in stream.sequences)


def test_who_is_not_confirmed_waits_for_nothing(turns: Turns) -> None:
    stream = turns.stream()
    turns.credits.number(stream.sequences[0].credit)
    assert stream.is_paced
    stream.stop_confirming()
    assert not stream.is_paced
    assert stream.sequences[0].is_urgent


def test_times_of_tokens(turns: Turns) -> None:
    first, second = turns.stream(n=2).sequences
    since_arrival, since_last = first.time_tokens(10.0)
    assert since_arrival is not None
    assert since_last is None
    assert first.time_tokens(10.5) == (None, 0.5)
    assert second.time_tokens(11.0) == (None, None)


@pytest.mark.usefixtures("frequent_switches")
def test_nothing_is_lost_between_the_threads(turns: Turns) -> None:
    """Each token comes out once and in order, though each response waits for an acknowledgement of the one before."""
    (sequence,) = turns.stream().sequences
    found: list[int] = []
    sent: list[int] = []
    count = 20000

    def serve() -> None:
        while turns.next() is not None:
            if sequence.finished or (not sequence.reason and sequence.must_wait(1)):
                continue
            if sequence.gather() is not None:
                found.extend(np.frombuffer(sequence.take().part.token_ids, dtype="<i4").tolist())
                sent.append(turns.credits.send(sequence.credit, time.monotonic()))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    given = acknowledged = 0
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:  # before its end, which would hide a turn that was lost
        if given < count:
            append_outputs({7: sequence}, outputs((7, given, 0)))
            given += 1
        if len(sent) > acknowledged:  # each once: another would hide that one was lost
            acknowledged += 1
            turns.credits.acknowledge([7], [acknowledged], time.monotonic())
            sequence.note_acknowledged()
    assert len(found) == count
    assert len(sent) > 10
    sequence.append(-1, LENGTH)
    turns.close()
    server.join(30)
    assert found == list(range(count))
    assert sequence.finished
