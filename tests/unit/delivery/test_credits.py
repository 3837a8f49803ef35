"""Which streams count as gone and what is on its way, without sockets or clocks."""

from __future__ import annotations

from minisgl_backend.delivery.credits import StreamCredits

GRACE, SILENCE = 0.02, 0.6


class Streams(StreamCredits):
    """Streams by uid; opened by their first response."""

    def __init__(self) -> None:
        super().__init__(2, gap_grace_s=GRACE, silence_s=SILENCE)
        self.expire(0.0)
        self.by_uid: dict = {}

    def sent(self, uid: int, now: float, sender: int = 0) -> int:
        if uid not in self.by_uid:
            self.by_uid[uid] = self.open(uid, sender)
        return self.send(self.by_uid[uid], now)

    def tick(self, start: float, end: float, step: float = 0.01) -> list[int]:
        """Streams that expire while the clock runs from start to end."""
        gone = []
        for index in range(round((end - start) / step) + 1):
            gone += self.expire(start + index * step)
        return gone


def test_acknowledged_streams_are_never_gone() -> None:
    streams = Streams()
    for number in range(1, 51):
        now = number * 0.01
        assert streams.sent(1, now) == streams.sent(2, now) == number
        streams.acknowledge([1, 2], [number, number], now + 0.005)
        assert streams.expire(now) == []
    assert streams.tick(0.5, 5.0) == []
    assert streams.num_in_flight == 0


def test_a_stream_that_others_overtake_is_gone_after_the_grace() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    streams.sent(2, 0.0)
    streams.acknowledge([2], [1], 0.01)
    assert streams.expire(0.01) == []
    assert streams.expire(0.011 + GRACE) == [1]
    assert streams.tick(0.1, 2.0) == [], "each of them is reported once"


def test_a_late_acknowledgement_closes_the_gap() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    streams.sent(2, 0.0)
    streams.acknowledge([2], [1], 0.01)
    assert streams.expire(0.01) == []
    streams.acknowledge([1], [1], 0.02)
    assert streams.tick(0.02, 3.0) == []


def test_what_waits_behind_acknowledged_responses_is_no_gap() -> None:
    streams = Streams()
    streams.sent(2, 0.0)
    streams.sent(1, 0.0)
    streams.acknowledge([2], [1], 0.01)
    assert streams.tick(0.01, 0.5) == []


def test_order_means_nothing_across_senders() -> None:
    streams = Streams()
    streams.sent(1, 0.0, sender=0)
    streams.sent(2, 0.0, sender=1)
    streams.acknowledge([2], [1], 0.01)
    assert streams.tick(0.01, 0.5) == []


def test_a_stream_alone_is_gone_by_silence() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    streams.sent(1, 0.1)
    assert streams.tick(0.0, SILENCE) == []
    assert streams.expire(SILENCE + 0.02) == [1]


def test_a_busy_detokenizer_is_not_silent() -> None:
    streams = Streams()
    for _ in range(100):
        streams.sent(2, 0.0)
    streams.sent(1, 0.0)
    for number in range(100):
        streams.acknowledge([2], [number + 1], number * 0.03)
        assert streams.expire(number * 0.03) == []


def test_a_stopped_front_blames_nobody() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    assert streams.expire(10.0) == [], "the front itself was asleep for ten seconds"
    streams.acknowledge([1], [1], 10.01)
    assert streams.tick(10.02, 12.0) == []


def test_the_detokenizer_may_say_it_itself() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    assert streams.acknowledge([1, 1, 77], [1, -1, -1], 0.01) == [1]
    assert streams.num_in_flight == 0
    assert streams.tick(0.01, 3.0) == []


def test_closed_and_unknown_streams_mean_nothing() -> None:
    streams = Streams()
    streams.sent(1, 0.0)
    streams.sent(2, 0.0)
    streams.close(1)
    streams.acknowledge([2, 77], [1, 5], 0.01)
    assert streams.tick(0.01, 3.0) == []
    assert streams.num_in_flight == 0
    assert streams.in_flight(0, sent_after=-1.0) == 0


def test_one_acknowledgement_covers_all_up_to_its_number() -> None:
    streams = Streams()
    for _ in range(5):
        streams.sent(1, 0.0)
    assert streams.num_in_flight == streams.in_flight(0, sent_after=-1.0) == 5
    streams.acknowledge([1], [4], 0.01)
    assert streams.num_in_flight == streams.in_flight(0, sent_after=-1.0) == 1
    streams.acknowledge([1], [2], 0.02)
    assert streams.by_uid[1].acknowledged == 4, "an older one changes nothing"


def test_what_is_old_holds_nobody_up() -> None:
    streams = Streams()
    streams.sent(1, 1.0)
    streams.sent(2, 2.0)
    assert streams.in_flight(0, sent_after=0.5) == 2
    assert streams.in_flight(0, sent_after=1.5) == 1
    assert streams.num_in_flight == 2, "it may still be acknowledged"


def test_responses_that_nobody_acknowledges_are_numbered_alike() -> None:
    streams = Streams()
    credit = streams.open(1, 0)
    assert [streams.number(credit), streams.send(credit, 0.0), streams.number(credit)] == [1, 2, 3]
    assert streams.num_in_flight == 1
