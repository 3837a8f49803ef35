"""When streams are asked for their clients: seldom, not too much of the time, and at once where one has left."""

from __future__ import annotations

from itertools import pairwise

from minisgl_backend.delivery.client_checks import (
    AGAIN_S,
    ALARM_EVERY_S,
    ALARM_S,
    EVERY_S,
    FEW,
    FEW_LATEST_S,
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
    for uid in range(100, 100 + FEW):
        checks.note(uid, 1.0 - COST_S, 1.0, gone=False)
    cost = 0.01
    pause = cost * (1 / SHARE - 1)
    checks.note(1, 1.0, 1.0 + COST_S, gone=False)
    start = 1.0 + EVERY_S - cost
    checks.note(2, start, start + cost, gone=False)
    assert not checks.is_due(1, 1.0 + EVERY_S + pause / 2)
    assert checks.is_due(1, start + cost + pause)
    checks.note(2, 1.0 + LATEST_S - cost, 1.0 + LATEST_S, gone=False)
    assert checks.is_due(1, 1.0 + LATEST_S + COST_S)


def test_few_streams_are_asked_in_turn_and_not_all_in_one_burst() -> None:
    checks = ClientChecks()
    step_s, chunk_s, uids = 0.02, 0.0006, range(8)
    asked_at: dict[int, list[float]] = {uid: [] for uid in uids}
    in_burst = []
    for burst in range(200):
        count = 0
        for uid in uids:
            now = 1.0 + burst * step_s + uid * chunk_s
            if asked(checks, uid, now):
                asked_at[uid].append(now)
                count += 1
        in_burst.append(count)
    assert in_burst[0] == len(uids)  # nobody knows them yet
    assert set(in_burst[1:]) <= {0, 1}
    waits = [after - before for times in asked_at.values() for before, after in pairwise(times)]
    assert max(waits) < FEW_LATEST_S + step_s


def test_a_stream_that_ended_keeps_no_turn() -> None:
    checks = ClientChecks()
    checks.note(1, 1.0, 1.0 + COST_S, gone=False)
    checks.note(2, 1.05, 1.05 + COST_S, gone=False)
    assert not checks.is_due(2, 1.0 + FEW_LATEST_S - COST_S)
    assert checks.is_due(2, 1.0 + FEW_LATEST_S + COST_S)


def test_one_stream_is_asked_as_often_as_one_of_many() -> None:
    checks = ClientChecks()
    found = sum(asked(checks, 1, 1.0 + burst * 0.02) for burst in range(100))
    assert found >= 0.9 * 2.0 / (EVERY_S + 0.02)


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
