"""Requests below the default priority beside others: their share of a step, and what it leaves to the others."""

from __future__ import annotations

import pytest

from minisgl_backend.request import Request
from minisgl_backend.scheduler.background import PASSED_OVER, UNLIMITED, BackgroundShare
from minisgl_backend.step import StepPlan
from tests.fakes import Loop, make_request
from tests.unit.scheduler.test_scheduler import assert_same_as_alone, limits, make_loop

READS_WEIGHTS = ((1, 0.010), (32, 0.041))  # 10 ms, and 1 ms for each token more
BATCH = 1000


@pytest.mark.parametrize(
    ("slowdown", "table", "others", "most"),
    [
        (1.0, READS_WEIGHTS, 8, 0),
        (1.3, READS_WEIGHTS, 1, 3),  # 13 ms
        (1.5, READS_WEIGHTS, 8, 8),  # 25.5 instead of 17 ms
        (2.0, READS_WEIGHTS, 41, 50),  # beyond what was timed: 100 ms
        (1.3, ((1, 0.01), (64, 0.01)), 8, UNLIMITED),  # a token more costs nothing
        (1.3, ((1, 0.011), (32, 0.010), (64, 0.074)), 4, 28 + 1),  # the first step was disturbed
        (1.3, ((1, 0.001), (32, 0.032)), 1, 1),  # never none
        (1.3, (), 8, UNLIMITED),
    ],
)
def test_the_share_is_a_time(slowdown: float, table: tuple[tuple[int, float], ...], others: int, most: int) -> None:
    assert BackgroundShare(slowdown, table).most_tokens(others, 0) == most


def test_first_tokens_come_first_but_not_for_ever() -> None:
    share = BackgroundShare(1.5, READS_WEIGHTS)
    found = [share.most_tokens(0, 8) for _ in range(2 * (PASSED_OVER + 1))]
    assert found == [*[0] * PASSED_OVER, 8] * 2


def streams_and_batch(overlap: bool = False, batch: int = 12, **changes: object) -> Loop:
    """Two streams, then requests of a batch with longer prompts."""
    values: dict[str, object] = {
        "step_seconds": READS_WEIGHTS,
        "background_slowdown": 1.5,
        "max_running_requests": 20,
        **changes,
    }
    loop = make_loop(limits(num_pages=400, **values), overlap)
    for uid in range(2):
        loop.scheduler.add(make_request(uid, [uid] * 5, max_tokens=60, ignore_eos=True))
    loop.step()
    for request in batch_of(batch):
        loop.scheduler.add(request)
    return loop


def batch_of(count: int) -> list[Request]:
    return [
        make_request(uid, [uid] * 20, max_tokens=8, ignore_eos=True, priority=BATCH) for uid in range(10, 10 + count)
    ]


def background_tokens(plan: StepPlan) -> int:
    prompts = sum(len(chunk.token_ids) for chunk in plan.prefill)
    return prompts + int((plan.decode_uids >= 10).sum())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [16, 0])
def test_streams_go_on_in_every_step_and_the_batch_has_its_share(overlap: bool, mixed: int) -> None:
    loop = streams_and_batch(overlap, batch=30, mixed_prefill_length=mixed)
    begun = len(loop.runner.plans)
    loop.run()
    plans = loop.runner.plans[begun:]
    beside = [plan for plan in plans if {0, 1} <= set(plan.decode_uids.tolist())]
    assert len(beside) >= 57, "each step has a token of the streams"
    shares = [background_tokens(plan) for plan in beside]
    assert max(shares) == 5  # 16.5 instead of 11 ms
    assert sum(shares) >= 4.5 * len(shares), "no part of it is left unused"
    alone = [plan for plan in plans[len(beside) :] if len(plan.decode_uids)]
    assert max(map(background_tokens, alone)) > 5, "alone it has all"
    assert_same_as_alone(loop, batch_of(30), 200)


def test_with_a_slowdown_of_1_a_batch_waits() -> None:
    loop = streams_and_batch(background_slowdown=1.0)
    begun = len(loop.runner.plans)
    loop.run()
    beside = [plan for plan in loop.runner.plans[begun:] if {0, 1} & set(plan.decode_uids.tolist())]
    assert set(map(background_tokens, beside)) == {0}
    assert all(len(loop.records.tokens[uid]) == 8 for uid in range(10, 22)), "and has its turn behind them"


def test_a_prompt_of_a_stream_overtakes_those_of_a_batch() -> None:
    """Also one that has begun, and one that has a row."""
    loop = streams_and_batch(batch=1, background_slowdown=1.2)
    loop.step()
    loop.scheduler.add(make_request(5, [3] * 10, max_tokens=3, ignore_eos=True))
    loop.step()
    (chunk, *_) = loop.runner.plans[-1].prefill
    assert len(chunk.token_ids) == 10
    assert loop.records.tokens[5], "its first token comes with the next step"


def test_a_batch_gives_rows_back() -> None:
    loop = make_loop(limits(max_running_requests=4, step_seconds=READS_WEIGHTS, background_slowdown=1.5))
    for uid in range(10, 14):
        loop.scheduler.add(make_request(uid, [uid] * 5, max_tokens=100, ignore_eos=True, priority=BATCH))
    loop.step()
    loop.step()
    loop.scheduler.add(make_request(0, [1] * 5, max_tokens=3, ignore_eos=True))
    for _ in range(3):
        loop.step()
    assert loop.records.tokens[0]
    loop.run()
    assert all(len(loop.records.tokens[uid]) == 100 for uid in range(10, 14))


def test_a_batch_gives_pages_back() -> None:
    bounds = limits(num_pages=30, max_seq_len=110, step_seconds=READS_WEIGHTS, background_slowdown=1.5)
    loop = make_loop(bounds)
    for uid in range(10, 13):
        loop.scheduler.add(make_request(uid, [uid] * 30, max_tokens=10, ignore_eos=True, priority=BATCH))
    for _ in range(6):
        loop.step()
    loop.scheduler.add(make_request(0, [1] * 60, max_tokens=3, ignore_eos=True))
    for _ in range(4):
        loop.step()
    assert loop.records.tokens[0]
    loop.run()
    assert all(len(loop.records.tokens[uid]) == 10 for uid in range(10, 13))
