"""How long sequences stay after their client, against two steps and 50 ms."""

from __future__ import annotations

import pytest

from minisgl_backend.engine.core import EngineCore
from minisgl_backend.engine.core_server import Cancellations
from minisgl_backend.request import FinishReason
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, make_request

STEP_S = 0.2


def after_steps(count: int) -> Cancellations:
    cancellations = Cancellations()
    for index in range(count):
        cancellations.end_turn([], index * STEP_S, stepped=True)
    return cancellations


def test_what_is_gone_within_two_steps_is_in_time_however_long_they_take() -> None:
    cancellations = after_steps(10)  # the last one ended at 1.8
    cancellations.begin([1], 1.9)
    cancellations.end_turn([], 2.0, stepped=True)
    cancellations.begin([1, 2], 1.95)
    cancellations.end_turn([1, 2], 2.24, stepped=True)
    assert sum(cancellations.seconds.counts) == 2
    assert cancellations.seconds.sum == pytest.approx(2 * (2.24 - 1.95))
    assert cancellations.num_late == 0


@pytest.mark.parametrize(("gone", "late"), [(2.2, 0), (2.24, 0), (2.26, 1), (3.0, 1)])
def test_50_ms_after_the_second_step_is_late(gone: float, late: int) -> None:
    cancellations = after_steps(12)  # steps ended at 2.0 and 2.2 after the finding
    cancellations.begin([1], 1.9)
    cancellations.end_turn([1], gone, stepped=True)
    assert cancellations.num_late == late


def test_an_idle_engine_has_no_steps_to_wait_for() -> None:
    cancellations = Cancellations()
    cancellations.begin([1], 5.0)
    cancellations.end_turn([1], 9.0, stepped=False)
    assert cancellations.num_late == 0
    assert sum(cancellations.seconds.counts) == 1


def test_ends_for_other_reasons_and_unknown_sequences_are_not_counted() -> None:
    cancellations = after_steps(3)
    cancellations.begin([7], 0.5)
    cancellations.end_turn([1, 2], 0.6, stepped=True)
    cancellations.end_turn([7], 0.7, stepped=True)
    assert sum(cancellations.seconds.counts) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_are_back_at_the_end_of_the_turn_that_heard_of_it(overlap: bool) -> None:
    limits = SchedulerLimits(
        page_size=4,
        num_pages=64,
        max_seq_len=64,
        max_running_requests=4,
        max_waiting_requests=4,
        max_prefill_length=32,
        mixed_prefill_length=16,
        eos_token_ids=(3,),
    )
    scheduler = Scheduler(limits, seed=0)
    core = EngineCore(scheduler, FakeRunner(limits), overlap=overlap)
    core.submit(make_request(1, [5, 6, 7], max_tokens=50, ignore_eos=True))
    for _ in range(5):
        core.step()
        core.drain_outputs()
    assert core.stats().pages_leased > 0
    core.abort([1], FinishReason.CANCELLED)
    core.step()
    outputs = core.drain_outputs()
    assert outputs is not None
    assert outputs.uids[outputs.reasons == FinishReason.CANCELLED].tolist() == [1]
    assert core.stats().pages_leased == 0
