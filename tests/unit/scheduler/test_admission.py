"""Admission: pages are used well and rarely taken back, with answer lengths that nobody knows beforehand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepPlan, StepResult

EOS = 2
NUM_PAGES = 400
PAGE_SIZE = 16


class EndingRunner:
    """Samples the end of each sequence at the length that was drawn for it."""

    def __init__(self, ends: dict[int, int]) -> None:
        self._ends = ends
        self._uids: dict[int, int] = {}  # by row

    def run(self, plan: StepPlan) -> StepResult:
        self._uids.update({admitted.row: admitted.uid for admitted in plan.admitted})
        places = [(chunk.row, chunk.end) for chunk in plan.prefill if chunk.samples]
        places += zip(plan.decode_rows.tolist(), plan.decode_lengths.tolist(), strict=True)
        tokens = [EOS if at >= self._ends[self._uids[row]] else 7 for row, at in places]
        return StepResult(plan.step, np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: int(rng.lognormal(5.0, 0.8)),
        lambda rng: int(rng.integers(5, 300)),
        lambda rng: 800 if rng.random() < 0.1 else 30,
    ],
    ids=["lognormal", "uniform", "bimodal"],
)
def test_preemption_is_rare_and_pages_are_used(draw: Callable[[np.random.Generator], int]) -> None:
    rng = np.random.default_rng(0)
    limits = SchedulerLimits(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_seq_len=2048,
        max_running_requests=64,
        max_waiting_requests=1000,
        max_prefill_length=2048,
        mixed_prefill_length=256,
        eos_token_ids=(EOS,),
    )
    scheduler, ends = Scheduler(limits, seed=0), {}
    for uid in range(400):
        prompt = rng.integers(3, 1000, int(rng.integers(20, 200)), dtype=np.int32)
        ends[uid] = len(prompt) + max(1, min(draw(rng), 1024)) - 1
        scheduler.add(Request(uid=uid, token_ids=prompt.tobytes(), params=SamplingParams(max_tokens=1024)))
    runner, leased = EndingRunner(ends), []
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, runner.run(plan))
        stats = scheduler.stats()
        if stats.num_waiting > 10:  # while there is more to do than fits
            leased.append(stats.pages_leased / NUM_PAGES)
    assert scheduler.stats().total_finished == 400
    assert scheduler.stats().total_preempted <= 0.01 * scheduler.stats().step
    assert np.mean(leased) > 0.5
