"""The prompt budget beside streams, from made-up step times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from minisgl_backend.config import TILE_TOKENS
from minisgl_backend.runner.build import build_runner
from minisgl_backend.runner.prefill_budget import (
    BACKLOG_FACTOR,
    DEEP_BACKLOG_FACTOR,
    TARGET_S,
    choose_prefill_budget,
    measure_prefill_budget,
)
from tests.unit.runner.test_build import runtime_for


def machine(floor_ms: float, tokens_per_s: float):  # type: ignore[no-untyped-def]
    """Reading the weights takes `floor_ms`, computing goes on beside it."""
    return lambda num_tokens: max(floor_ms / 1000, num_tokens / tokens_per_s)


@pytest.mark.parametrize(
    ("floor_ms", "tokens_per_s", "expected"),
    [
        (1.0, 390_000, 7808),  # 0.6B on an H200
        (7.4, 23_000, 512),  # 14B on an H200: 460, and the planner would make 384 of it
        (7.4, 27_000, 512),
        (7.4, 12_900, 256),
        (9.0, 11_000, 220),  # less than two tiles
        (0.5, 1_000_000, 8192),  # no more than a step may have
    ],
)
def test_the_budget_fills_the_target(floor_ms: float, tokens_per_s: float, expected: int) -> None:
    budget, backlog = choose_prefill_budget(machine(floor_ms, tokens_per_s), 8192)
    assert budget == pytest.approx(expected, rel=0.02)
    assert budget < 256 or budget % TILE_TOKENS == 0
    assert backlog.mixed_prefill_length == min(8192, BACKLOG_FACTOR * budget)
    assert backlog.most_prefill_length == min(8192, DEEP_BACKLOG_FACTOR * budget)
    assert backlog.waiting_tokens == pytest.approx(budget / TARGET_S, rel=0.01)


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
    prepare, prompts = runner.prepare, []
    runner.prepare = lambda plan: prompts.extend(plan.prefill) or prepare(plan)  # type: ignore[method-assign,func-returns-value]
    measure_prefill_budget(runner, runtime, model.vocab_size)
    longest = max((chunk.token_ids for chunk in prompts), key=len)
    assert len(np.unique(longest)) > len(longest) // 2
    assert 0 <= longest.min() <= longest.max() < model.vocab_size
