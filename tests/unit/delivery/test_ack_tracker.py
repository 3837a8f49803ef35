"""Which streams count as gone, without sockets or clocks."""

from __future__ import annotations

from minisgl_backend.delivery.ack_tracker import AckTracker

GRACE, SILENCE = 0.02, 0.6


def make() -> AckTracker:
    confirmations = AckTracker(gap_grace_s=GRACE, silence_s=SILENCE)
    confirmations.expire(0.0)
    return confirmations


def tick(confirmations: AckTracker, start: float, end: float, step: float = 0.01) -> list[int]:
    """Streams that expire while the clock runs from start to end."""
    gone = []
    for index in range(round((end - start) / step) + 1):
        gone += confirmations.expire(start + index * step)
    return gone


def test_confirmed_streams_are_never_gone() -> None:
    confirmations = make()
    for number in range(50):
        now = number * 0.01
        confirmations.on_sent(1, number, now)
        confirmations.on_sent(2, number, now)
        confirmations.on_handled([1, 2], [number, number], now + 0.005)
        assert confirmations.expire(now) == []
    assert tick(confirmations, 0.5, 5.0) == []
    assert confirmations.unconfirmed(1) == confirmations.unconfirmed(2) == 0


def test_a_stream_that_others_overtake_is_gone_after_the_grace() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    confirmations.on_sent(2, 0, 0.0)
    confirmations.on_handled([2], [0], 0.01)
    assert confirmations.expire(0.01) == []
    assert confirmations.expire(0.011 + GRACE) == [1]
    assert tick(confirmations, 0.1, 2.0) == [], "each of them is reported once"


def test_a_late_confirmation_closes_the_gap() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    confirmations.on_sent(2, 0, 0.0)
    confirmations.on_handled([2], [0], 0.01)
    assert confirmations.expire(0.01) == []
    confirmations.on_handled([1], [0], 0.02)
    assert tick(confirmations, 0.02, 3.0) == []


def test_what_waits_behind_confirmed_responses_is_no_gap() -> None:
    confirmations = make()
    confirmations.on_sent(2, 0, 0.0)
    confirmations.on_sent(1, 0, 0.0)
    confirmations.on_handled([2], [0], 0.01)
    assert tick(confirmations, 0.01, 0.5) == []


def test_order_means_nothing_across_senders() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0, sender=0)
    confirmations.on_sent(2, 0, 0.0, sender=1)
    confirmations.on_handled([2], [0], 0.01)
    assert tick(confirmations, 0.01, 0.5) == []


def test_a_stream_alone_is_gone_by_silence() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    confirmations.on_sent(1, 1, 0.1)
    assert tick(confirmations, 0.0, SILENCE) == []
    assert confirmations.expire(SILENCE + 0.02) == [1]


def test_a_busy_detokenizer_is_not_silent() -> None:
    confirmations = make()
    for number in range(100):
        confirmations.on_sent(2, number, 0.0)
    confirmations.on_sent(1, 0, 0.0)
    for number in range(100):
        confirmations.on_handled([2], [number], number * 0.03)
        assert confirmations.expire(number * 0.03) == []


def test_a_stopped_front_blames_nobody() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    assert confirmations.expire(10.0) == [], "the front itself was asleep for ten seconds"
    confirmations.on_handled([1], [0], 10.01)
    assert tick(confirmations, 10.02, 12.0) == []


def test_the_detokenizer_may_say_it_itself() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    assert confirmations.on_handled([1, 1, 77], [0, -1, -1], 0.01) == [1]
    assert confirmations.total_unconfirmed() == 0
    assert tick(confirmations, 0.01, 3.0) == []


def test_forgotten_and_unknown_streams_mean_nothing() -> None:
    confirmations = make()
    confirmations.on_sent(1, 0, 0.0)
    confirmations.on_sent(2, 0, 0.0)
    confirmations.forget(1)
    confirmations.on_handled([2, 77], [0, 5], 0.01)
    assert tick(confirmations, 0.01, 3.0) == []
    assert confirmations.unconfirmed(1) == confirmations.unconfirmed(77) == 0


def test_one_confirmation_covers_all_up_to_its_number() -> None:
    confirmations = make()
    for number in range(5):
        confirmations.on_sent(1, number, 0.0)
    assert confirmations.unconfirmed(1) == confirmations.total_unconfirmed() == 5
    confirmations.on_handled([1], [3], 0.01)
    assert confirmations.unconfirmed(1) == 1
