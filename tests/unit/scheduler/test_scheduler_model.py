"""The scheduler under random events: short sequences that hypothesis chooses and shrinks, and long ones from seeds.

Every law is proven after every event; see `machine`.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.encoder_limits import EncoderLimits
from minisgl_backend.kv.kinds import FULL, Chunked, Sliding
from minisgl_backend.request import FinishReason, Grammar
from minisgl_backend.scheduler import image_share
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.step import StepTimes
from tests.proposers import KINDS
from tests.unit.scheduler.machine import EOS, ON_DEVICE, POOLINGS, SchedulerMachine

CACHE_KINDS = [
    (FULL,),
    (FULL,),
    (Sliding(3),),
    (Sliding(9),),
    (FULL, Sliding(5)),
    (FULL, Sliding(2), Sliding(7)),
    (FULL, FULL, Sliding(4)),
    (FULL, Sliding(3), Chunked(6)),
    (FULL, FULL, *[Sliding(4)] * 4),
]


def bounds_of(page_size: int, **changes: Any) -> SchedulerLimits:
    values = {
        "page_size": page_size,
        "num_pages": -(-32 // page_size),
        "max_seq_len": 24,
        "max_running_requests": 4,
        "max_waiting_requests": 1000,
        "max_prefill_length": 8,
        "mixed_prefill_length": 3,
        "eos_token_ids": EOS,
    }
    return SchedulerLimits(**{**values, **changes})


def adapters_of(count: int) -> tuple[ServedAdapter, ...]:
    return tuple(ServedAdapter(f"a{number}", number, bytes([number + 1]) * 16) for number in range(count))


@pytest.mark.parametrize("careless", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [
        bounds_of(1),
        bounds_of(1, schedule_policy="lpm", mixed_prefill_length=0),
        bounds_of(2),
        bounds_of(1, adapters=adapters_of(3), num_adapter_slots=1),
        bounds_of(2, adapters=adapters_of(7), num_adapter_slots=2, schedule_policy="lpm"),
        bounds_of(4, max_prefill_length=100, mixed_prefill_length=100),
        bounds_of(4, cache_type="naive"),
        bounds_of(8, num_pages=4, max_seq_len=100),
        bounds_of(2, num_pages=100, max_running_requests=8),
        bounds_of(4, chunk_multiple=4),
        bounds_of(2, cache_kinds=(Sliding(5),), num_pages=12),
        bounds_of(4, cache_kinds=(FULL, Sliding(6), Chunked(6)), num_pages=21),
        bounds_of(1, cache_kinds=(FULL, Sliding(2), Sliding(7)), num_pages=60, cache_type="naive"),
        bounds_of(1, chunk_multiple=1, num_state_slots=2),
        bounds_of(2, chunk_multiple=2, num_state_slots=5),
        bounds_of(2, chunk_multiple=2, num_state_slots=20, num_pages=100, max_running_requests=8),
        bounds_of(4, chunk_multiple=4, num_state_slots=7, cache_kinds=(FULL, Sliding(6)), num_pages=14),
        bounds_of(4, chunk_multiple=4, num_state_slots=4, cache_type="naive"),
    ],
    ids=lambda one: (
        f"page{one.page_size}-{one.num_pages}-{one.cache_type}-{one.schedule_policy}-{one.cache_kinds}-"
        f"{one.num_state_slots}"
    ),
)
def test_any_order_of_events_keeps_every_law(
    bounds: SchedulerLimits, careless: bool, pytestconfig: pytest.Config
) -> None:
    is_full = pytestconfig.getoption("--full", default=False)
    machine = type("Machine", (SchedulerMachine,), {"bounds": bounds, "careless": careless})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25 if is_full else 12,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


ENCODER = EncoderLimits(
    num_layers=3, capacity=8, vector_bytes=1, state_bytes=2, patch_area=16, patch_cost=0.5, pair_cost=0.1
)


@pytest.mark.parametrize(
    "bounds",
    [
        bounds_of(1, encoder=ENCODER, step_times=StepTimes(prompts=((0, 1.0), (64, 9.0)), rows=((1, 1.0), (4, 2.0)))),
        bounds_of(4, max_prefill_length=100, encoder=dataclasses.replace(ENCODER, capacity=4, part_patches=2)),
        bounds_of(4, chunk_multiple=4, encoder=dataclasses.replace(ENCODER, capacity=8)),
        bounds_of(2, mixed_prefill_length=0, encoder=dataclasses.replace(ENCODER, num_ranks=2, bidirectional=True)),
        bounds_of(2, cache_kinds=(FULL, Sliding(5)), num_pages=32, encoder=ENCODER),
        bounds_of(1, cache_type="naive", encoder=dataclasses.replace(ENCODER, num_layers=1, patch_cost=9.0)),
    ],
    ids=lambda one: f"page{one.page_size}-{one.encoder.capacity}-{one.cache_type}-{one.cache_kinds}",
)
def test_images_are_encoded_before_what_needs_them(
    bounds: SchedulerLimits, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once while they are held; what is counted is what the runner has. Every other step may be long."""
    monkeypatch.setattr(image_share, "EVERY", 2)
    monkeypatch.setattr(image_share, "LONG_S", 6.0)
    monkeypatch.setattr(image_share, "_LEAST", 1)
    machine = type("Machine", (SchedulerMachine,), {"bounds": bounds, "careless": True})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60 if pytestconfig.getoption("--full", default=False) else 12,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 12))])
def test_a_long_random_run_keeps_every_law(seed: int) -> None:
    long_run(seed, num_events=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(100, 108), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(108, 200))]
)
def test_many_long_random_runs_keep_every_law(seed: int) -> None:
    long_run(seed, num_events=500)


def long_run(seed: int, num_events: int) -> None:
    """One scheduler with random limits; by far the most events are plans and commits."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8, 16])
    bounds = bounds_of(
        page_size,
        num_pages=max(-(-rng.choice([24, 40, 64, 200]) // page_size), 2),
        max_seq_len=rng.choice([24, 40, 100]),
        max_running_requests=rng.choice([1, 2, 4, 9, 20]),
        max_prefill_length=rng.choice([1, 4, 8, 16, 100]),
        mixed_prefill_length=rng.choice([0, 1, 3, 8, 50]),
        cache_type=rng.choice(["radix", "radix", "naive"]),
        schedule_policy=rng.choice(["fcfs", "lpm"]),
        fair_shares=seed % 3 == 0,
        background_slowdown=(1.0, 1.4)[seed % 2],
        chunk_multiple=page_size if seed % 5 == 0 else 1,
        step_times=StepTimes(prompts=((0, 1.0), (4, 1.2)), rows=((1, 1.0), (4, 1.4))) if seed % 4 else None,
    )
    cache_kinds = rng.choice(CACHE_KINDS)
    bounds = dataclasses.replace(bounds, cache_kinds=cache_kinds, num_pages=bounds.num_pages * len(cache_kinds))
    if seed % 2:
        num_slots = 2 + seed * 7 % (3 * bounds.max_running_requests)
        bounds = dataclasses.replace(bounds, num_state_slots=num_slots, chunk_multiple=page_size)
    kinds = ("", *KINDS, ON_DEVICE)
    kind = kinds[seed % len(kinds)]
    parts = {"bounds": bounds, "careless": rng.random() < 0.7, "proposer_kind": kind}
    machine_class = type("Machine", (SchedulerMachine,), parts)
    machine: SchedulerMachine = machine_class()
    stems = [[rng.randrange(2) for _ in range(60)] for _ in range(3)]
    for _ in range(num_events):
        event = rng.random()
        if event < 0.15:
            stem = rng.choice(stems)[: rng.randrange(60)]
            params = {**random_params(rng, machine.now), "tenant": "abc"[machine.next_uid % 3]}
            machine.add([*stem, rng.randrange(3)], params, early=rng.randrange(4))
        elif event < 0.20 and machine.next_uid:
            recent = rng.randrange(max(0, machine.next_uid - 12), machine.next_uid)
            if event < 0.19:
                machine.abort_one(recent, rng.choice([FinishReason.CANCELLED, FinishReason.STOP]))
            else:
                machine.fail_one(recent)
        elif event < 0.22:
            machine.time_passes(rng.randrange(1, 5))
        elif event < 0.6 and len(machine.in_flight) < 2:
            machine.try_plan()
        elif machine.in_flight:
            machine.commit()
        machine.laws_hold()
    machine.teardown()


def random_params(rng: random.Random, now: float) -> dict[str, Any]:
    return {
        "max_tokens": rng.choice([None, None, 1, 5, 20, 40]),
        "n": rng.choice([1, 1, 1, 2, 5]),
        "ignore_eos": rng.random() < 0.7,
        "priority": rng.choice([0, 0, 0, 1, 9]),
        "stop_token_ids": rng.choice([(), (), (3,), (4, 5, 6)]),
        "logprobs": rng.choice([None, None, 1]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "grammar": rng.choice([None] * 5 + [Grammar(kind="json")]),
        "pooling": rng.choice(POOLINGS),
        "deadline": rng.choice([None] * 8 + [now + 5.0, now + 50.0]),
    }
