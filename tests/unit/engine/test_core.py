"""The engine loop over the real scheduler and a pretended device."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl_backend.engine import core
from minisgl_backend.engine.core import MAX_FAILED_STEPS, EngineCore
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.request import FinishReason, Grammar, SamplingParams
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import RowError, StepPlan
from tests.fakes import FakeRunner, Records, expected_answer, make_request

LIMITS = SchedulerLimits(
    page_size=4,
    num_pages=256,
    max_seq_len=256,
    max_running_requests=16,
    max_waiting_requests=64,
    max_prefill_length=32,
    mixed_prefill_length=16,
    eos_token_ids=(3,),
)


NONE = np.zeros(0, dtype=np.int32)
TRIAL = StepPlan(-1, (), NONE, NONE, NONE, (), NONE, NONE, NONE.astype(np.int64))


class FailingRunner(FakeRunner):
    """Raises in the stages that it is told to, before it changes anything on the device."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.fails_prepare: Any = lambda plan: False
        self.refused: Any = lambda params: False  # of an admitted row
        self.asked: dict[int, SamplingParams] = {}  # what the host keeps for each row
        self.fails_execute: Any = lambda plan: False
        self.error: Exception = RuntimeError("no memory for that")

    def prepare(self, plan: StepPlan) -> StepPlan:
        for admitted in plan.admitted:
            self.asked[admitted.row] = admitted.params
            if self.refused(admitted.params):
                raise RowError(admitted.row, OverflowError("too large a number"))
        assert not any(map(self.refused, self.asked.values())), "what was refused is still there"
        if self.fails_prepare(plan):
            raise self.error
        return plan

    def execute(self, batch: StepPlan) -> Any:
        if self.fails_execute(batch):
            raise self.error
        return super().execute(batch)


class Harness:
    def __init__(self, overlap: bool, limits: SchedulerLimits = LIMITS) -> None:
        self.scheduler = Scheduler(limits, seed=0)
        self.runner = FailingRunner(limits)
        self.core = EngineCore(self.scheduler, self.runner, overlap=overlap, health_check_plan=TRIAL)
        self.records = Records()

    def run(self, most_steps: int = 10_000) -> Records:
        for _ in range(most_steps):
            busy = self.core.step()
            self.scheduler.check()
            self.records.take(self.core)  # type: ignore[arg-type]
            if not busy:
                assert not self.scheduler.has_work
                assert self.scheduler.stats().pages_leased == 0
                return self.records
        raise AssertionError("work is left")


@pytest.fixture(params=[False, True], ids=["sequential", "overlapped"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(request.param)


def test_answers_are_those_of_each_request_alone(harness: Harness) -> None:
    requests = [make_request(uid, range(5, 8 + 3 * uid), max_tokens=20 + uid) for uid in range(10)]
    for request in requests:
        harness.core.submit(request)
    records = harness.run()
    for request in requests:
        answer = expected_answer(request, LIMITS.max_seq_len, LIMITS.eos_token_ids)
        assert (records.tokens[request.uid], records.reasons[request.uid]) == answer


def test_refused_requests_come_back(harness: Harness) -> None:
    harness.core.submit(make_request(1, []))
    harness.core.submit(make_request(2, [5] * 300))
    harness.core.submit(make_request(3, [5], grammar=Grammar(kind="json")))
    rejected = harness.core.take_rejected()
    assert [(r.uid, r.kind) for r in rejected] == [(uid, "InvalidRequestError") for uid in (1, 2, 3)]
    assert all(r.message for r in rejected)
    assert harness.core.take_rejected() == []
    for uid in range(LIMITS.max_waiting_requests + 1):
        harness.core.submit(make_request(10 + uid, [5], max_tokens=1))
    assert [(r.uid, r.kind) for r in harness.core.take_rejected()] == [(74, "CapacityError")]
    harness.run()


def test_aborted_sequences_get_their_last_record(harness: Harness) -> None:
    for uid in range(3):
        harness.core.submit(make_request(uid, [5, 6, 7], max_tokens=100, ignore_eos=True))
    for _ in range(5):
        harness.core.step()
    harness.core.abort([0, 99], FinishReason.CANCELLED)
    harness.core.abort([1], FinishReason.STOP)
    records = harness.run()
    assert records.reasons == {0: FinishReason.CANCELLED, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
    assert len(records.tokens[2]) == 100


def test_rows_that_the_runner_reports_fail_alone(harness: Harness) -> None:
    harness.runner.fail = lambda uid: uid == 1
    for uid in range(3):
        harness.core.submit(make_request(uid, [5, 6, 7 + uid], max_tokens=9, ignore_eos=True))
    records = harness.run()
    assert records.reasons[1] == FinishReason.ERROR
    assert records.reasons[0] == records.reasons[2] == FinishReason.LENGTH


def test_a_prompt_that_breaks_the_step_does_not_break_running_streams(harness: Harness) -> None:
    running = make_request(0, [5, 6, 7], max_tokens=30, ignore_eos=True)
    harness.core.submit(running)
    for _ in range(4):
        harness.core.step()
    harness.runner.fails_execute = lambda plan: any(len(chunk.token_ids) > 8 for chunk in plan.prefill)
    harness.core.submit(make_request(1, range(5, 17), max_tokens=5))
    records = harness.run()
    assert records.reasons[1] == FinishReason.ERROR
    assert "no memory for that" in records.details[1][-1].error
    expected, reason = expected_answer(running, LIMITS.max_seq_len, LIMITS.eos_token_ids)
    assert (records.tokens[0], records.reasons[0]) == (expected, reason)
    follower = make_request(2, [8, 9], max_tokens=5, ignore_eos=True)
    harness.core.submit(follower)
    assert len(harness.run().tokens[2]) == 5, "the engine goes on"


def test_a_step_that_fails_as_a_whole_ends_its_sequences_only(harness: Harness) -> None:
    for uid in range(2):
        harness.core.submit(make_request(uid, [5, 6, 7 + uid], max_tokens=50, ignore_eos=True))
    for _ in range(6):
        harness.core.step()
    failures = iter([True])
    harness.runner.fails_execute = lambda plan: next(failures, False)
    records = harness.run()
    assert set(records.reasons.values()) == {FinishReason.ERROR}
    harness.core.submit(make_request(5, [8, 9], max_tokens=5, ignore_eos=True))
    assert harness.run().reasons[5] == FinishReason.LENGTH


def test_a_request_that_cannot_be_prepared_ends_alone(harness: Harness) -> None:
    """Neither streams nor prompts that arrive with it are lost, and whoever gets its row is not disturbed."""
    harness.runner.refused = lambda params: params.min_tokens > 1000
    asked = [make_request(uid, [5, 6, 7 + uid], max_tokens=20, ignore_eos=True) for uid in range(8)]
    for request in asked[:2]:
        harness.core.submit(request)
    for _ in range(4):
        harness.core.step()
    harness.core.submit(asked[2])
    harness.core.submit(make_request(10, [5, 6, 7], max_tokens=5000, min_tokens=4000))
    harness.core.submit(asked[3])
    harness.core.submit(make_request(11, [5, 6, 7, 8, 9], max_tokens=5000, min_tokens=4000, n=3))
    records = harness.run()
    for request in asked[4:]:
        harness.core.submit(request)
    harness.run()
    for request in asked:
        answer = expected_answer(request, LIMITS.max_seq_len, LIMITS.eos_token_ids)
        assert (records.tokens[request.uid], records.reasons[request.uid]) == answer
    for uid in (10, 11, 12, 13):
        assert records.reasons[uid] == FinishReason.ERROR
        assert "OverflowError: too large a number" in records.details[uid][-1].error


def test_requests_that_cannot_be_prepared_never_end_the_engine(harness: Harness) -> None:
    harness.runner.refused = lambda params: params.min_tokens > 1000
    for uid in range(4 * MAX_FAILED_STEPS):
        harness.core.submit(make_request(uid, [5, 6], max_tokens=5000, min_tokens=4000))
        assert harness.run().reasons[uid] == FinishReason.ERROR
    harness.core.submit(make_request(99, [8, 9], max_tokens=5, ignore_eos=True))
    assert harness.run().reasons[99] == FinishReason.LENGTH


@pytest.mark.parametrize("stage", ["fails_prepare", "fails_execute"])
def test_requests_that_break_steps_never_end_an_engine_that_computes(harness: Harness, stage: str) -> None:
    """Alone or beside streams; that it computes is tried with a health-check step."""
    setattr(harness.runner, stage, lambda plan: any(5 in chunk.token_ids for chunk in plan.prefill))
    for uid in range(4 * MAX_FAILED_STEPS):
        harness.core.submit(make_request(uid, [5, 6], max_tokens=5))
        assert harness.run().reasons[uid] == FinishReason.ERROR
    harness.core.submit(make_request(50, [8, 9], max_tokens=50, ignore_eos=True))
    for uid in range(100, 100 + 4 * MAX_FAILED_STEPS):
        harness.core.step()
        harness.core.submit(make_request(uid, [5, 6], max_tokens=5))
    records = harness.run()
    assert (len(records.tokens[50]), records.reasons[50]) == (50, FinishReason.LENGTH)
    assert {records.reasons[uid] for uid in range(100, 100 + 4 * MAX_FAILED_STEPS)} == {FinishReason.ERROR}


def test_pages_of_failed_sequences_are_cleared_before_others_get_them(harness: Harness) -> None:
    """The fake runner finds what was left."""
    harness.runner.fail = lambda uid: uid % 2 == 0
    for uid in range(60):
        harness.core.submit(make_request(uid, range(5, 20 + uid), max_tokens=9, ignore_eos=True))
    records = harness.run()
    assert [records.reasons[uid] for uid in range(4)] == [FinishReason.ERROR, FinishReason.LENGTH] * 2


def test_pages_are_cleared_even_where_the_step_that_was_to_do_it_failed(harness: Harness) -> None:
    harness.runner.fail = lambda uid: uid == 0
    harness.core.submit(make_request(0, range(100), max_tokens=9, ignore_eos=True))
    assert harness.run().reasons[0] == FinishReason.ERROR
    harness.runner.fails_execute = lambda plan: len(plan.cleared_pages) > 0
    harness.core.submit(make_request(1, range(5), max_tokens=9, ignore_eos=True))
    assert harness.run().reasons[1] == FinishReason.ERROR
    harness.runner.fails_execute = lambda plan: False
    harness.core.submit(make_request(2, range(5, 55), max_tokens=9, ignore_eos=True))
    assert harness.run().reasons[2] == FinishReason.LENGTH


def test_pages_change_hands_even_where_the_step_that_was_to_say_so_failed() -> None:
    """Equal prompts share pages once they are computed; a prompt comes before either goes on, and breaks its step."""
    for overlap in (False, True):
        harness = Harness(overlap, dataclasses.replace(LIMITS, max_prefill_length=64, mixed_prefill_length=0))
        equal = [make_request(uid, range(10, 30), max_tokens=20, ignore_eos=True) for uid in range(2)]
        for request in equal:
            harness.core.submit(request)
        for _ in range(1 + overlap):
            harness.core.step()
        harness.runner.fails_execute = lambda plan: True
        harness.core.submit(make_request(2, range(40, 50), max_tokens=3))
        harness.core.step()
        harness.runner.fails_execute = lambda plan: False
        harness.core.submit(make_request(3, range(50, 80), max_tokens=3, ignore_eos=True))
        records = harness.run()
        assert records.reasons[2] == FinishReason.ERROR
        for request in equal:
            answer = expected_answer(request, LIMITS.max_seq_len, LIMITS.eos_token_ids)
            assert (records.tokens[request.uid], records.reasons[request.uid]) == answer


class Activations:
    """What a forward pass allocates."""


def test_what_a_failed_step_had_allocated_is_free_when_it_is_tried_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core.log, "disabled", True)  # pytest keeps records, and with them exceptions
    seen: list[weakref.ref[Activations]] = []
    alive: list[bool] = []

    def fails_on_prompts(plan: StepPlan) -> bool:
        alive.extend(one() is not None for one in seen)
        if len(plan.decode_rows) and plan.prefill:
            activations = Activations()
            seen.append(weakref.ref(activations))
            raise MemoryError("none is left")
        return False

    harness.core.submit(make_request(0, [5, 6], max_tokens=20, ignore_eos=True))
    for _ in range(4):
        harness.core.step()
    harness.runner.fails_execute = fails_on_prompts
    harness.core.submit(make_request(1, [7, 8, 9], max_tokens=5))
    assert harness.run().reasons == {0: FinishReason.LENGTH, 1: FinishReason.ERROR}
    assert seen
    assert not any(alive)


def test_the_engine_gives_up_when_every_step_fails(harness: Harness) -> None:
    harness.runner.fails_execute = lambda plan: True
    for uid in range(MAX_FAILED_STEPS):
        harness.core.submit(make_request(uid, [5, 6], max_tokens=5))
        if uid < MAX_FAILED_STEPS - 1:
            assert harness.run().reasons[uid] == FinishReason.ERROR
    with pytest.raises(EngineDeadError, match="3 steps in a row"):
        harness.core.step()


def test_the_engine_gives_up_at_once_when_the_device_is_lost(harness: Harness) -> None:
    harness.runner.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    harness.runner.fails_execute = lambda plan: True
    harness.core.submit(make_request(0, [5, 6], max_tokens=5))
    with pytest.raises(EngineDeadError, match="device failed"):
        harness.core.step()


def test_the_log_names_the_requests_that_a_step_failed(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    harness.core.submit(msgspec.structs.replace(make_request(0, [5, 6, 7], max_tokens=30), request_id="runs on"))
    for _ in range(4):
        harness.core.step()
    harness.runner.fails_execute = lambda plan: any(len(chunk.token_ids) > 8 for chunk in plan.prefill)
    broken = make_request(1, range(5, 17), max_tokens=5)
    harness.core.submit(msgspec.structs.replace(broken, request_id="breaks\nthe step"))
    harness.run()
    (line,) = [record.message for record in caplog.records if "ended with an error" in record.message]
    assert line == "ended with an error: 1 request: 'breaks\\nthe step'"


def test_the_log_names_the_requests_that_are_lost_with_the_engine(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.runner.error = RuntimeError("CUDA error: out of memory, and nothing works any more")
    harness.core.submit(msgspec.structs.replace(make_request(0, [5, 6], max_tokens=1), request_id="done before"))
    harness.run()
    harness.runner.fails_execute = lambda plan: True
    harness.core.submit(msgspec.structs.replace(make_request(1, [5, 6], max_tokens=5), request_id="abc"))
    harness.core.submit(make_request(2, [5, 6], max_tokens=5))
    harness.core.submit(make_request(3, [], max_tokens=5))
    with pytest.raises(EngineDeadError):
        harness.core.step()
    assert "lost with the engine: 2 requests: 'abc', 'uid 2'" in [record.message for record in caplog.records]
