"""More adapters than slots: what waits for one blocks nobody, waits a bounded time, and adapters take turns."""

from __future__ import annotations

import random
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.cache.salt import prefix_salt
from minisgl_backend.errors import CapacityError, InvalidRequestError
from minisgl_backend.ipc.messages import Stats
from minisgl_backend.request import FinishReason
from minisgl_backend.scheduler.adapters import PATIENCE_S
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepResult
from tests.fakes import FakeRunner, Records, expected_answer, make_request

VOCAB_SIZE = 50


class Served:
    """A scheduler and a runner that checks, in each step, that a row's slot has its own adapter."""

    def __init__(self, adapters: int, slots: int, **changes: Any) -> None:
        served = tuple(ServedAdapter(f"a{number}", number, bytes([number]) * 16) for number in range(adapters))
        values: dict[str, Any] = {
            "page_size": 4, "num_pages": 4000, "max_seq_len": 400, "max_running_requests": 64,
            "max_waiting_requests": 1000, "max_prefill_length": 4000, "mixed_prefill_length": 4000,
            "adapters": served, "num_adapter_slots": slots, **changes,
        }  # fmt: skip
        limits = SchedulerLimits(**values)
        self.now, self.records, self.uid = 0.0, Records(), 0
        self.scheduler = Scheduler(limits, seed=1, clock=lambda: self.now)
        self.runner = FakeRunner(limits, VOCAB_SIZE)
        self.first: dict[int, int] = {}  # by uid: the step of its first token
        self.steps = 0

    def ask(self, adapter: int | None, prompt: list[int], max_tokens: int) -> int:
        uid, self.uid = self.uid, self.uid + 1
        name = None if adapter is None else f"a{adapter}"
        options = {"max_tokens": max_tokens, "ignore_eos": True, "lora_name": name}
        self.request = make_request(uid, prompt, **options)
        self.scheduler.add(self.request)
        return uid

    def ask_for(self, adapter: int | None, prompt: list[int], **options: Any) -> range:
        uids = range(self.uid, self.uid + options["n"])
        self.uid = uids.stop
        name = None if adapter is None else f"a{adapter}"
        self.request = make_request(uids.start, prompt, ignore_eos=True, lora_name=name, **options)
        self.scheduler.add(self.request)
        if name is not None:
            self.runner.adapter_of.update(dict.fromkeys(uids, self.runner.adapters[name]))
        return uids

    def serve(self, name: str, number: int, content: int) -> None:
        """A name is given to another adapter."""
        self.runner.hosted.add(number)
        self.runner.adapters[name] = number
        self.scheduler.adapters.serve(ServedAdapter(name, number, b"new" + content.to_bytes(13, "big")))

    def step(self) -> bool:
        plan = self.scheduler.plan()
        self.steps += 1
        if plan is not None:
            self.scheduler.commit(plan, self.runner.execute(plan).result())
        self.records.take(self.scheduler)
        for uid in self.records.tokens.keys() - self.first.keys():
            self.first[uid] = self.steps
        return plan is not None

    def ended(self, uid: int) -> bool:
        return uid in self.records.reasons


def test_forty_adapters_over_two_slots_with_aborts() -> None:
    dice, served, expected = random.Random(1), Served(40, 2, max_running_requests=8, num_pages=60), {}
    for _ in range(300):
        uid = served.ask(dice.choice([None, *range(40)]), [dice.randrange(4) for _ in range(9)], dice.randrange(1, 20))
        expected[uid] = expected_answer(served.request, 400, (), VOCAB_SIZE)[0]
        for _ in range(dice.randrange(4)):
            served.step()
        if dice.random() < 0.2:
            served.scheduler.abort(dice.randrange(served.uid), FinishReason.CANCELLED)
        served.scheduler.check()
    while served.scheduler.has_work:
        assert served.step(), "something waits for ever"
        served.scheduler.check()
    for uid, answer in expected.items():
        found = served.records.tokens.get(uid, [])
        assert found == answer or (
            served.records.reasons[uid] is FinishReason.CANCELLED and found == answer[: len(found)]
        )
    assert served.runner.loads > 40


@pytest.mark.parametrize("seed", range(6))
def test_forty_adapters_over_two_slots_that_come_and_go(seed: int) -> None:
    """Names are given to other adapters and taken away while requests with them wait, run and are preempted."""
    dice, served = random.Random(seed), Served(40, 2, max_running_requests=8, num_pages=45, adapters_change=True)
    book, runner, expected = served.scheduler.adapters, served.runner, {}
    numbers = set(range(40))
    salts = [None, "a", prefix_salt("a", bytes([3]) * 16).decode("latin-1"), bytes([3] * 16).decode()]
    for turn in range(250):
        served.now += dice.choice([0, 0, 0, PATIENCE_S + 1])
        adapter = dice.choice([None, *range(40), *[0] * 20])
        prompt = [dice.randrange(4) for _ in range(9)]
        options = {"max_tokens": dice.randrange(1, 20), "cache_salt": dice.choice(salts), "n": dice.choice([1, 1, 3])}
        if adapter is None or book.get(f"a{adapter}") is not None:
            for uid in served.ask_for(adapter, prompt, **options):
                expected[uid] = expected_answer(served.request, 400, (), VOCAB_SIZE)[0]
        else:
            with pytest.raises(InvalidRequestError, match="which is not served"):
                served.ask_for(adapter, prompt, **options)
        name = f"a{dice.choice([0, dice.randrange(40)])}"
        if dice.random() < 0.5:
            number = book.new_number()
            assert number not in numbers, "a generation is never used twice"
            numbers.add(number)
            served.serve(name, number, turn)
        elif dice.random() < 0.3:
            assert book.remove(name) == (runner.adapters.pop(name, None) is not None)
        for _ in range(dice.randrange(4)):
            served.step()
        if dice.random() < 0.2:
            served.scheduler.abort(dice.randrange(served.uid), FinishReason.CANCELLED)
        runner.hosted.difference_update(book.take_dropped())
        assert runner.hosted >= set(runner.adapters.values())
        assert len(runner.hosted) == book.num_on_host
        served.scheduler.check()
    while served.scheduler.has_work:
        served.now += 1
        assert served.step(), "something waits for ever"
        served.scheduler.check()
    runner.hosted.difference_update(book.take_dropped())
    assert runner.hosted == set(runner.adapters.values()), "nothing is left of what no name stands for"
    for uid, answer in expected.items():
        found = served.records.tokens.get(uid, [])
        assert found == answer or (
            served.records.reasons[uid] is FinishReason.CANCELLED and found == answer[: len(found)]
        )
    assert served.scheduler.stats().total_preempted > 0
    assert book.num_on_host <= 40


def test_what_waits_for_a_slot_blocks_nobody() -> None:
    served = Served(2, 1)
    long = served.ask(0, [1, 2, 3], 300)
    for _ in range(3):
        served.step()
    waiting, base = served.ask(1, [4, 5], 4), served.ask(None, [6, 7], 4)
    served.step()
    same = served.ask(0, [8, 9], 4)
    for _ in range(10):
        served.step()
    assert served.ended(base)
    assert not served.ended(waiting)
    assert not served.ended(same), "its adapter's slot goes on to the one that waits"
    stats = served.scheduler.stats()
    assert (stats.num_waiting, stats.adapters_open, stats.adapters_waiting, stats.total_adapter_loads) == (2, 1, 2, 1)
    figures = {name: asdict(one) for name, one in served.scheduler.adapter_stats().items()}
    expected = {"a0": {"slots": 1, "running": 1, "waiting": 1}, "a1": {"slots": 0, "running": 0, "waiting": 1}}
    sent = msgspec.msgpack.encode(Stats(values={}, adapters=figures))
    assert msgspec.msgpack.decode(sent, type=Stats).adapters == expected
    while not served.ended(long):
        served.step()
    for _ in range(12):
        served.step()
    assert served.first[waiting] < served.first[same]


def test_an_answer_that_does_not_end_gives_way_in_time() -> None:
    served = Served(2, 1)
    long = served.ask(0, [1, 2, 3], 300)
    served.step()
    waiting = served.ask(1, [4, 5], 4)
    for _ in range(5):
        served.step()
    assert waiting not in served.first
    served.now += PATIENCE_S + 1
    for _ in range(8):
        served.step()
    assert served.ended(waiting)
    assert served.scheduler.stats().total_preempted == 1
    while not served.ended(long):
        assert served.step()
    assert len(served.records.tokens[long]) == 300


@pytest.mark.parametrize(("rows", "least"), [(64, 0.55), (16, 0.95)])
def test_sixteen_adapters_over_eight_slots(rows: int, least: float) -> None:
    """64 requests always open, with answers of 64 tokens."""

    def measured(adapters: int) -> tuple[float, int]:
        """Tokens a step, and the longest wait for a first token, in steps."""
        dice, served = random.Random(2), Served(adapters, 8, max_running_requests=rows)
        asked: dict[int, int] = {}
        for _ in range(64 * 5):
            while len(asked) - len(served.records.reasons) < 64:
                uid = served.ask(dice.randrange(adapters), [dice.randrange(VOCAB_SIZE) for _ in range(32)], 64)
                asked[uid] = served.steps
            served.step()
        waits = [served.first[uid] - step for uid, step in asked.items() if uid in served.first]
        still = [served.steps - step for uid, step in asked.items() if uid not in served.first]
        return sum(map(len, served.records.tokens.values())) / served.steps, max(waits + still)

    (alone, alone_wait), (together, wait) = measured(8), measured(16)
    assert together >= least * alone, (together, alone)
    assert wait <= 2.5 * (64 + alone_wait), (wait, alone_wait)


def test_a_load_that_was_not_executed_is_planned_again() -> None:
    served = Served(2, 1)
    uid = served.ask(1, [1, 2, 3], 4)
    for _ in range(2):
        plan = served.scheduler.plan()
        assert plan is not None
        assert plan.adapter_loads == ((1, 1),)
        failed = frozenset(chunk.row for chunk in plan.prefill)
        result = StepResult(plan.step, np.zeros(1, np.int32), failed_rows=failed, executed=False)
        served.scheduler.commit(plan, result)
        served.records.take(served.scheduler)
        assert served.ended(uid)
        uid = served.ask(1, [1, 2, 3], 4)
    served.scheduler.check()


def test_what_waits_for_a_slot_counts_as_its_tenants() -> None:
    """So that one tenant's requests for an adapter without a slot leave room for others'."""
    served = Served(2, 1, fair_shares=True, max_waiting_requests_per_tenant=3, max_waiting_requests=100)
    served.ask(0, [1, 2], 50)
    served.step()
    for _ in range(3):
        served.ask(1, [1, 2], 5)
    with pytest.raises(CapacityError, match="3 requests of this tenant are waiting"):
        served.ask(1, [1, 2], 5)
    (stats,) = [one for one in served.scheduler.tenant_stats().values() if one.num_running]
    assert (stats.num_running, stats.num_waiting) == (1, 3)
