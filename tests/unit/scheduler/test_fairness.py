"""Fair shares between tenants, by a clock that goes on with what steps compute."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from minisgl_backend.errors import CapacityError
from minisgl_backend.scheduler.fairness import MAX_TENANTS, OTHERS, FairShares
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.policy import FirstComeFirstServed
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepPlan, StepResult
from tests.fakes import FakePending, Loop, make_request

STEP_MS, TOKEN_MS = 5.0, 0.05


def limits(**changes: object) -> SchedulerLimits:
    values: dict[str, object] = {
        "page_size": 4,
        "num_pages": 4000,
        "max_seq_len": 300,
        "max_running_requests": 32,
        "max_waiting_requests": 1000,
        "max_prefill_length": 512,
        "mixed_prefill_length": 128,
        "fair_shares": True,
    }
    return SchedulerLimits(**{**values, **changes})  # type: ignore[arg-type]


class AnyRunner:
    """Samples the same token everywhere."""

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def execute(self, plan: StepPlan) -> FakePending:
        return FakePending(StepResult(plan.step, np.full(len(plan.sampled_rows), 5, dtype=np.int32)))


class Timed(Loop):
    """A loop whose steps take time, and that knows when each sequence had its first and its last token."""

    def __init__(self, bounds: SchedulerLimits, overlap: bool = True) -> None:
        super().__init__(Scheduler(bounds, seed=0), AnyRunner(), overlap, check=False)  # type: ignore[arg-type]
        self.now = 0.0
        self.sent: dict[int, float] = {}
        self.first: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self._random = random.Random(1)

    def send(self, tenant: str, uids: Sequence[int], max_tokens: int) -> None:
        for uid in uids:
            prompt = [self._random.randrange(97) for _ in range(16)]
            self.sent[uid] = self.now
            self.scheduler.add(make_request(uid, prompt, tenant=tenant, max_tokens=max_tokens, ignore_eos=True))

    def step(self) -> bool:
        before = self.scheduler.stats()
        busy = super().step()
        after = self.scheduler.stats()
        tokens = after.prefill_tokens + after.decode_tokens if after.step != before.step else 0
        self.now += STEP_MS + TOKEN_MS * tokens
        for uid in self.records.tokens:
            self.first.setdefault(uid, self.now)
        for uid in self.records.reasons:
            self.last.setdefault(uid, self.now)
        return busy

    def wait(self, uids: Sequence[int]) -> float:
        """Median of what first tokens took."""
        return statistics.median(self.first[uid] - self.sent[uid] for uid in uids)


def beside(num_first: int, bounds: SchedulerLimits, *, num_second: int = 4) -> tuple[float, float]:
    """Median wait of a second tenant's first tokens, and when the first tenant has all of its long answers."""
    loop = Timed(bounds)
    first, second = range(num_first), range(1000, 1000 + num_second)
    loop.send("first", first, max_tokens=80)
    for _ in range(40):
        loop.step()
    loop.send("second", second, max_tokens=10)
    loop.run()
    loop.scheduler.check()
    return loop.wait(second) if num_second else 0.0, max(loop.last[uid] for uid in first)


ROWS, PAGES = {}, {"max_running_requests": 128, "num_pages": 400}


@pytest.mark.parametrize("scarce", [ROWS, PAGES], ids=["rows are scarce", "pages are scarce"])
def test_who_sends_little_does_not_wait_for_who_sends_much(scarce: dict[str, object]) -> None:
    bounds = limits(**scarce)
    wait, end = beside(200, bounds)
    assert wait <= 2 * beside(4, bounds)[0]
    assert end <= 1.05 * beside(200, bounds, num_second=0)[1]
    assert beside(200, limits(fair_shares=False, **scarce))[0] > 10 * wait


@pytest.mark.parametrize(("weights", "expected"), [((), 0.5), ((("b", 3.0),), 0.75)])
def test_tokens_are_shared_by_weight(weights: tuple[tuple[str, float], ...], expected: float) -> None:
    loop = Timed(limits(tenant_weights=weights))
    loop.send("a", range(200), max_tokens=100)
    loop.send("b", range(500, 1000), max_tokens=25)
    for _ in range(300):
        loop.step()
    served = loop.scheduler.tenant_stats()
    tokens = {name: one.total_prompt_tokens + one.total_generated_tokens for name, one in served.items()}
    assert tokens["b"] / (tokens["a"] + tokens["b"]) == pytest.approx(expected, abs=0.06)
    loop.scheduler.check()


def test_rows_that_are_shared_are_not_taken_again() -> None:
    """Up to half of the share: two tenants with much to do do not fight over them."""
    loop = Timed(limits())
    loop.send("a", range(200), max_tokens=100)
    for _ in range(20):
        loop.step()
    loop.send("b", range(500, 700), max_tokens=100)
    for _ in range(150):
        loop.step()
    assert loop.scheduler.stats().total_preempted == 8
    running = {name: one.num_running for name, one in loop.scheduler.tenant_stats().items()}
    assert min(running.values()) >= 8


def test_of_two_rows_each_tenant_has_one() -> None:
    loop = Timed(limits(max_running_requests=2))
    loop.send("a", range(4), max_tokens=200)
    for _ in range(10):
        loop.step()
    loop.send("b", [100], max_tokens=200)
    for _ in range(5):
        loop.step()
    assert 100 in loop.first


def test_a_lower_priority_waits_for_all_tenants_and_takes_nobodys_row() -> None:
    loop = Timed(limits(max_running_requests=4))
    loop.send("a", range(12), max_tokens=20)
    for _ in range(5):
        loop.step()
    for uid, priority in ((100, 9), (101, 1)):
        loop.scheduler.add(make_request(uid, [5, 6], tenant="b", max_tokens=2, priority=priority, ignore_eos=True))
    loop.run()
    assert loop.first[101] < min(loop.last[uid] for uid in range(4))
    assert loop.first[100] > max(loop.first[uid] for uid in range(12))


def test_each_tenant_has_room_in_the_queue() -> None:
    scheduler = Scheduler(limits(max_waiting_requests=8))
    for uid in range(4):
        scheduler.add(make_request(uid, [5], tenant="a"))
    with pytest.raises(
        CapacityError, match="4 requests of this tenant are waiting, all that max_waiting_requests_per_t"
    ):
        scheduler.add(make_request(9, [5], tenant="a"))
    scheduler.add(make_request(9, [5], tenant="b"))
    assert {name: one.num_waiting for name, one in scheduler.tenant_stats().items()} == {"a": 4, "b": 1}
    scheduler.check()


def test_more_tenants_than_are_told_apart_are_one() -> None:
    shares = FairShares(limits(), FirstComeFirstServed)
    numbers = [shares.enter(str(name), 1) for name in range(MAX_TENANTS + 5)]
    assert len(set(numbers)) == MAX_TENANTS
    assert numbers[-6:] == [OTHERS] * 6
    shares.leave(numbers[3])
    assert shares.enter("new", 1) == numbers[3]
    assert shares.enter("", 1) == OTHERS
    assert "3" not in shares.stats()
    assert shares.stats()[""].num_running == 7


def test_nobody_saves_up_while_the_engine_is_idle() -> None:
    shares = FairShares(limits(), FirstComeFirstServed)
    busy = shares.enter("a", 1)
    shares.note_admitted(busy, 0, 1_000_000, 0)
    shares.leave(busy)
    rested = shares.enter("b", 1)
    shares.leave(rested)
    assert shares.enter("a", 1) == busy
    served = {"a": 0.0, "b": 0.0}
    for name, number in (("a", busy), ("b", rested)):
        served[name] = float(shares._counters[number])
    assert served["a"] == served["b"]
