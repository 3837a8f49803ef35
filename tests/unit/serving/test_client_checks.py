"""When streams are asked for their clients: seldom, not too much of the time, and at once where one has left."""

from __future__ import annotations

from minisgl_backend.serving.client_checks import (
    AGAIN_S,
    ALARM_EVERY_S,
    ALARM_S,
    EVERY_S,
    LATEST_S,
    SHARE,
    ClientChecks,
)

COST_S = 0.0001


def asked(checks: ClientChecks, uid: int, now: float, *, cost: float = COST_S, gone: bool = False) -> bool:
    due = checks.is_due(uid, now)
    if due:
        checks.note(uid, now, now + cost, gone=gone)
    return due


def test_each_stream_is_asked_now_and_then() -> None:
    checks = ClientChecks()
    for uid in (1, 2):
        found = sum(asked(checks, uid, 10 * uid + step / 1000) for step in range(1000))
        assert 1 / EVERY_S * 0.9 < found <= 1 / EVERY_S


def test_while_asking_would_take_more_than_its_share_streams_wait_longer() -> None:
    checks = ClientChecks()
    cost = 0.01
    pause = cost * (1 / SHARE - 1)
    checks.note(1, 1.0, 1.0 + COST_S, gone=False)
    start = 1.0 + EVERY_S - cost
    checks.note(2, start, start + cost, gone=False)
    assert not checks.is_due(1, 1.0 + EVERY_S + pause / 2)
    assert checks.is_due(1, start + cost + pause)
    checks.note(2, 1.0 + LATEST_S - cost, 1.0 + LATEST_S, gone=False)
    assert checks.is_due(1, 1.0 + LATEST_S + COST_S)


def test_where_one_has_left_the_others_are_asked_at_once() -> None:
    checks = ClientChecks()
    for uid in range(10):
        assert asked(checks, uid, 1.0 + uid * COST_S)
    soon = 1.0 + ALARM_EVERY_S + 10 * COST_S
    assert not any(checks.is_due(uid, soon) for uid in range(10))
    assert asked(checks, 99, soon, gone=True)
    assert all(asked(checks, uid, soon + COST_S) for uid in range(10))
    assert not any(asked(checks, uid, soon + 2 * COST_S) for uid in range(10))
    calm = soon + ALARM_S + COST_S
    for uid in range(10):
        checks.note(uid, calm, calm + COST_S, gone=False)
    assert not checks.is_due(0, calm + ALARM_EVERY_S)


def test_who_was_found_gone_is_left_alone() -> None:
    checks = ClientChecks()
    assert asked(checks, 1, 1.0, gone=True)
    assert not any(checks.is_due(1, 1.0 + step / 100) for step in range(1, 100))
    assert checks.is_due(1, 1.0 + 2 * AGAIN_S)


def test_streams_that_ended_are_forgotten() -> None:
    checks = ClientChecks()
    for uid in range(10_000):
        now = 1.0 + uid * 0.001
        checks.note(uid, now, now + COST_S, gone=False)
    assert len(checks) < 3000
