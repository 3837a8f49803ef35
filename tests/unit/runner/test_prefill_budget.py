"""The prompt budget beside streams, from made-up step times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.encoders.base import TimedCall
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start import step_timer
from minisgl_backend.runner.start.build import build_runner
from minisgl_backend.runner.start.prefill_budget import (
    BACKLOG_FACTOR,
    DEEP_BACKLOG_FACTOR,
    TARGET_S,
    choose_prefill_budget,
    measure_prefill_budget,
)
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from minisgl_backend.runner.start.step_timer import ENCODER_CALLS, MOST_ROUNDS, StepTimer
from minisgl_backend.step import StepPlan
from tests.unit.runner.test_build import runtime_for


def machine(floor_ms: float, tokens_per_s: float):  # type: ignore[no-untyped-def]
    """Reading the weights takes `floor_ms`, computing goes on beside it."""
    return lambda num_tokens: max(floor_ms / 1000, num_tokens / tokens_per_s)


@pytest.mark.parametrize(
    ("floor_ms", "tokens_per_s", "expected"),
    [
        (1.0, 390_000, 8192),  # 0.6B on an H200: no more than a step may have
        (1.0, 300_000, 6656),
        (7.4, 23_000, 512),  # 14B on an H200: 506
        (7.4, 21_000, 512),  # 462, and the planner would make 384 of it
        (7.4, 12_900, 256),
        (9.0, 11_000, 242),  # less than two tiles
    ],
)
def test_the_budget_fills_the_target(floor_ms: float, tokens_per_s: float, expected: int) -> None:
    budget, backlog = choose_prefill_budget(machine(floor_ms, tokens_per_s), 8192)
    assert budget == pytest.approx(expected, rel=0.02)
    assert budget < 256 or budget % TILE_TOKENS == 0
    assert backlog.mixed_prefill_length == min(8192, BACKLOG_FACTOR * budget)
    assert backlog.most_prefill_length == min(8192, DEEP_BACKLOG_FACTOR * budget)
    assert backlog.waiting_tokens == pytest.approx(budget / TARGET_S, rel=0.01)


@pytest.mark.parametrize("longest", [300, 8000])
def test_a_step_may_have_as_many_as_it_can(longest: int) -> None:
    assert choose_prefill_budget(machine(0.5, 1_000_000), longest)[0] == longest


def test_a_machine_on_which_every_step_is_slow_still_computes_prompts_beside_streams() -> None:
    budget, backlog = choose_prefill_budget(machine(100.0, 320), 8192)  # a 0.6B model on two cores
    assert budget == pytest.approx(64, rel=0.02)
    assert backlog.mixed_prefill_length == BACKLOG_FACTOR * budget


def test_even_one_token_may_be_slow() -> None:
    budget, _ = choose_prefill_budget(lambda num_tokens: 0.1 * num_tokens, 8192)
    assert budget >= 1


def test_steps_are_timed_no_longer_than_needed() -> None:
    timed = []

    def seconds(num_tokens: int) -> float:
        timed.append(num_tokens)
        return num_tokens / 1000

    choose_prefill_budget(seconds, 8192)
    assert max(timed) <= 32


def test_what_is_timed_are_prompts_of_different_tokens(tiny_model_dir: Path) -> None:
    runtime, model = runtime_for(tiny_model_dir, num_pages=4, max_running_requests=4, max_prefill_length=64)
    runner = build_runner(runtime, model)
    first, second = timed_plans(runner, runtime, model), timed_plans(runner, runtime, model)
    longest = max((chunk.token_ids for plan in first for chunk in plan.prefill), key=len)
    assert len(np.unique(longest)) > len(longest) // 2
    assert 0 <= longest.min() <= longest.max() < model.vocab_size
    assert all(len(plan.decode_rows) == 1 for plan in first if plan.prefill), "a lone prompt's pass is another"
    for one, other in zip(first, second, strict=True):
        assert [list(chunk.token_ids) for chunk in one.prefill] == [list(chunk.token_ids) for chunk in other.prefill]


def test_an_engine_of_one_sequence_has_nothing_beside(tiny_model_dir: Path) -> None:
    runtime, model = runtime_for(tiny_model_dir, num_pages=4, max_running_requests=1, max_prefill_length=64)
    plans = timed_plans(build_runner(runtime, model), runtime, model)
    assert all(len(plan.decode_rows) == 0 for plan in plans if plan.prefill)
    assert max(chunk.end for plan in plans for chunk in plan.prefill) == 64


def test_ranks_agree_on_the_fastest_of_each_time(tiny_model_dir: Path) -> None:
    """Each knows its own times; steps of other sizes on other ranks would hang."""
    runtime, model = runtime_for(tiny_model_dir, num_pages=4, max_running_requests=4, max_prefill_length=64)
    told: list[int] = []

    def agreed(microseconds: int) -> int:
        if microseconds <= 1:
            return 1  # whether the rounds agree
        told.append(microseconds)
        return 1000 * len(told)  # another rank was as fast

    tp: Any = SimpleNamespace(minimum=agreed)
    found = measure_prefill_budget(build_runner(runtime, model), runtime, model.vocab_size, tp)
    assert found.step_times.prompts == ((0, 0.001), (1, 0.001), (32, 0.002), (64, 0.003))
    assert found.step_times.rows == ((1, 0.004), (4, 0.005))
    assert found.backlog is not None
    assert (found.mixed_prefill_length, found.backlog.waiting_tokens) == (64, int(64 / TARGET_S))


def test_calls_of_an_encoder_are_timed_by_what_they_attend_to(tiny_model_dir: Path) -> None:
    """2 ms of a call of one part, and 3 us more for each patch; one of two parts is a tenth cheaper than two."""
    runtime, model = runtime_for(tiny_model_dir, num_pages=4, max_running_requests=4, max_prefill_length=16)
    runner = build_runner(runtime, model)
    taken: list[int] = []

    def agreed(microseconds: int) -> int:
        return taken[-1]

    def calls() -> Iterator[TimedCall]:
        for seen in (1000, 4000):
            for parts, of_one in ((1, 2000 + 3 * seen), (2, 3600 + 5 * seen)):
                yield TimedCall(parts, seen, partial(taken.append, ENCODER_CALLS * of_one))
                taken.clear()

    runner.vectors = SimpleNamespace(timed_calls=calls)  # type: ignore[assignment]
    timer = StepTimer(runner, runtime, model.vocab_size, SimpleNamespace(minimum=agreed))  # type: ignore[arg-type]
    np.testing.assert_allclose(timer._time_encoder(), [(2e-3, 3e-6), (3.6e-3, 5e-6)], rtol=1e-6)


def test_what_is_timed_on_a_busy_machine_is_timed_again_and_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds of each round: of one token all are disturbed, of 64 all but two later ones."""
    rounds = {0: [0.9, 0.9, 0.9], 1: [116.0] * 3, 32: [1.9, 4.0, 2.0], 64: [700.0, 330.0, 900.0, 3.1, 500.0, 3.0]}
    now, done = [0.0], dict.fromkeys(rounds, 0)

    def prepare(plan: StepPlan) -> SimpleNamespace:
        size = sum(len(chunk.token_ids) for chunk in plan.prefill)
        now[0] += rounds[size][done[size] % len(rounds[size])] / 1000
        done[size] += 1
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    runner: Any = SimpleNamespace(prepare=prepare, execute=lambda batch: batch, vectors=None, num_state_slots=0)
    runtime: Any = SimpleNamespace(
        config=SimpleNamespace(max_running_requests=4), max_prefill_length=64, max_seq_len=200, device="cpu"
    )
    timer = StepTimer(runner, runtime, 100)
    for size in (1, 32, 64):
        timer.time_prompts(size)
    np.testing.assert_allclose(timer.times().prompts, [(0, 0.0009), (1, 0.0019), (32, 0.0019), (64, 0.003)])
    assert (done[1], done[32], done[64]) == (3, 3, 6)
    rounds[64] = [5.0**at for at in range(MOST_ROUNDS)]
    done[64] = 0
    timer.time_prompts(64)
    assert done[64] == MOST_ROUNDS, "not for ever"


def test_a_budget_that_is_given_stays_and_steps_are_timed_all_the_same(tiny_model_dir: Path) -> None:
    runtime, model = runtime_for(
        tiny_model_dir, num_pages=4, max_running_requests=4, max_prefill_length=16, mixed_prefill_length=5
    )
    found = measure_prefill_budget(build_runner(runtime, model), runtime, model.vocab_size)
    assert (found.mixed_prefill_length, found.backlog) == (5, None)
    assert [tokens for tokens, _ in found.step_times.prompts] == [0, 1, 16]
    assert [rows for rows, _ in found.step_times.rows] == [1, 4]


def timed_plans(runner: ModelRunner, runtime: RuntimeConfig, model: ModelConfig) -> list[StepPlan]:
    """Those of all sizes: each takes a millisecond, however busy this machine is."""
    prepare, plans = runner.prepare, list[StepPlan]()
    tp: Any = SimpleNamespace(minimum=lambda microseconds: 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "prepare", lambda plan: plans.append(plan) or prepare(plan))  # type: ignore[func-returns-value]
        measure_prefill_budget(runner, runtime, model.vocab_size, tp)
    return plans
