"""Requests below the default priority beside others: their share of a step, and what it leaves to the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from minisgl_backend.request import Request
from minisgl_backend.scheduler.background import PASSED_OVER, UNLIMITED, BackgroundShare
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.measured_steps import MeasuredSteps
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.scheduler.step_estimate import REMEMBERED
from minisgl_backend.step import StepPlan, StepResult, StepTimes
from tests.fakes import FakePending, FakeRunner, Loop, make_request
from tests.unit.scheduler.test_scheduler import assert_same_as_alone, limits

# 10 ms, 1 ms for each prompt token, and 2 for each row more that decodes
READS_WEIGHTS = StepTimes(prompts=((0, 0.010), (32, 0.042)), rows=((1, 0.010), (16, 0.040)))
FREE_TOKENS = StepTimes(prompts=((0, 0.010), (64, 0.010)), rows=((1, 0.010), (16, 0.040)))
FREE = StepTimes(prompts=((0, 0.010), (64, 0.010)), rows=((1, 0.010), (16, 0.010)))
FIRST_DISTURBED = StepTimes(prompts=((0, 0.013), (32, 0.010), (64, 0.042)), rows=((1, 0.020), (4, 0.012), (16, 0.036)))
BEYOND = StepTimes(prompts=((0, 0.010), (32, 0.042)), rows=((1, 0.010), (2, 0.010)))
LONELY = StepTimes(prompts=((0, 0.010), (32, 0.042)), rows=((1, 0.010),))
SLOW = StepTimes(prompts=((0, 0.001), (32, 0.033)), rows=((1, 0.001), (16, 0.031)))
BATCH = 1000


@pytest.mark.parametrize(
    ("slowdown", "times", "others", "background", "share"),
    [
        (1.0, READS_WEIGHTS, 8, 4, (0, 0)),
        (1.5, READS_WEIGHTS, 6, 0, (5, 10)),  # 10 ms on top of 20: rows cost what they cost, tokens what they do
        (1.5, READS_WEIGHTS, 6, 3, (5, 4)),  # rows come first
        (1.5, READS_WEIGHTS, 6, 9, (5, 0)),
        (3.0, READS_WEIGHTS, 16, 0, (40, 80)),  # beyond what was timed
        (1.5, FREE_TOKENS, 6, 3, (5, 102)),  # what seems to cost nothing is taken for a 256th of a step
        (1.5, FREE, 6, 9, (130, 121)),
        (1.5, FIRST_DISTURBED, 4, 0, (3, 36)),  # 6 ms on top of 12, whatever a step of a row was said to take
        (1.5, BEYOND, 2, 0, (5, 5)),  # a row costs no less than a token
        (1.5, LONELY, 1, 0, (5, 5)),
        (1.3, SLOW, 1, 3, (1, 0)),  # never none
        (1.3, SLOW, 1, 0, (0, 1)),
        (1.3, None, 8, 4, (UNLIMITED, UNLIMITED)),
    ],
)
def test_the_share_is_a_time(
    slowdown: float, times: StepTimes | None, others: int, background: int, share: tuple[int, int]
) -> None:
    found = BackgroundShare(slowdown, MeasuredSteps(times).estimate)
    found.of_step(others, 0, background)  # the first has nothing, and shows what a step takes without
    assert found.of_step(others, 0, background) == share


def test_first_tokens_come_first_but_not_for_ever() -> None:
    share = BackgroundShare(1.5, MeasuredSteps(READS_WEIGHTS).estimate)
    found = [share.of_step(1, 8, 0) for _ in range(2 * (PASSED_OVER + 1))]
    assert found == [*[(0, 0)] * PASSED_OVER, (4, 9)] * 2, "half of 18 ms"


@dataclass(frozen=True, kw_only=True)
class TimedPending(FakePending):
    runner: TimedRunner
    seconds: float

    def result(self) -> StepResult:
        self.runner.now += self.seconds
        return super().result()


class TimedRunner(FakeRunner):
    """Steps take what READS_WEIGHTS says."""

    now = 0.0  # seconds

    def execute(self, batch: StepPlan) -> TimedPending:
        seconds = 0.008 + sum(cost_ms(batch)) / 1000
        return TimedPending(super().execute(batch).value, runner=self, seconds=seconds)


def timed_loop(bounds: SchedulerLimits, overlap: bool = False) -> Loop:
    runner = TimedRunner(bounds)
    return Loop(Scheduler(bounds, seed=0, clock=lambda: runner.now), runner, overlap)


def streams_and_batch(overlap: bool = False, batch: int = 12, **changes: object) -> Loop:
    """Two streams, then requests of a batch with longer prompts."""
    values: dict[str, object] = {
        "step_times": READS_WEIGHTS,
        "background_slowdown": 1.5,
        "max_running_requests": 20,
        **changes,
    }
    loop = timed_loop(limits(num_pages=400, **values), overlap)
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


def cost_ms(plan: StepPlan) -> tuple[int, int]:
    """By READS_WEIGHTS, what rows of streams cost of a step, and all prompts and rows of a batch."""
    in_background = int((plan.decode_uids >= 10).sum())
    prompts = sum(len(chunk.token_ids) for chunk in plan.prefill)
    return 2 * (len(plan.decode_uids) - in_background), prompts + 2 * in_background


def background_ms(plan: StepPlan) -> int:
    return cost_ms(plan)[1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [16, 0])
def test_streams_go_on_in_every_step_and_the_batch_has_its_share(overlap: bool, mixed: int) -> None:
    loop = streams_and_batch(overlap, batch=30, mixed_prefill_length=mixed)
    begun = len(loop.runner.plans)
    loop.run()
    plans = loop.runner.plans[begun:]
    beside = [plan for plan in plans if {0, 1} <= set(plan.decode_uids.tolist())]
    assert len(beside) >= 57, "each step has a token of the streams"
    shares = [background_ms(plan) for plan in beside]
    assert max(shares) == 6  # 18 instead of 12 ms
    without = shares.count(0)
    assert REMEMBERED <= without <= REMEMBERED + 4, "some steps show what one takes without"
    assert sum(shares) >= 5.4 * (len(shares) - without), "no part of it is left unused"
    alone = [plan for plan in plans[len(beside) :] if len(plan.decode_uids)]
    assert max(map(background_ms, alone)) > 6, "alone it has all"
    assert_same_as_alone(loop, batch_of(30), 200)


def test_with_a_slowdown_of_1_a_batch_waits() -> None:
    loop = streams_and_batch(background_slowdown=1.0)
    begun = len(loop.runner.plans)
    loop.run()
    beside = [plan for plan in loop.runner.plans[begun:] if {0, 1} & set(plan.decode_uids.tolist())]
    assert set(map(background_ms, beside)) == {0}
    assert all(len(loop.records.tokens[uid]) == 8 for uid in range(10, 22)), "and has its turn behind them"


def test_where_nothing_is_in_the_background_no_share_is_reckoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BackgroundShare, "of_step")
    for name in ("note_plan", "note_end"):
        monkeypatch.delattr(MeasuredSteps, name)
    loop = streams_and_batch(batch=0)
    loop.scheduler.add(make_request(5, [3] * 10, max_tokens=3, ignore_eos=True))
    loop.run()
    assert [len(loop.records.tokens[uid]) for uid in (0, 1, 5)] == [60, 60, 3]


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
    loop = timed_loop(limits(max_running_requests=4, step_times=READS_WEIGHTS, background_slowdown=1.5))
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
    bounds = limits(num_pages=30, max_seq_len=110, step_times=READS_WEIGHTS, background_slowdown=1.5)
    loop = timed_loop(bounds)
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
