"""The periodic status line."""

from __future__ import annotations

import dataclasses

from minisgl_backend.engine.core_server import StatusLine
from minisgl_backend.step import StepStats

ZERO = StepStats(**{field.name: 0 for field in dataclasses.fields(StepStats)})


def test_rates_are_those_since_the_last_line() -> None:
    status = StatusLine(now=0.0, period_s=10.0)
    assert status.due == 10.0
    first = dataclasses.replace(
        ZERO,
        step=100,
        num_running=3,
        num_waiting=2,
        pages_total=50,
        pages_free=10,
        pages_cached=5,
        total_generated_tokens=1000,
        total_prompt_tokens=400,
        total_cached_tokens=100,
    )
    line = status.update(first, 10.0)
    assert line is not None
    assert line.startswith("running 3, waiting 2, generated 100 tok/s, prompts 30 tok/s, cache hits 25%")
    assert line.endswith("free pages 15 of 50, finished 0")
    assert len(line) < 120
    later = dataclasses.replace(first, step=200, total_generated_tokens=1500)
    line = status.update(later, 20.0)
    assert line is not None
    assert "generated 50 tok/s, prompts 0 tok/s, cache hits 0%" in line
    line = status.update(dataclasses.replace(later, step=300, total_failed=2, total_preempted=1), 30.0)
    assert line is not None
    assert line.endswith("finished 0, failed 2, preempted 1"), "what should not happen is told where it has"


def test_states_are_told_of_models_that_have_some() -> None:
    some = dataclasses.replace(ZERO, step=1, total_prompt_tokens=100, states_total=40, states_free=5, states_cached=7)
    line = StatusLine(now=0.0).update(some, 1.0)
    assert line is not None
    assert "free states 12 of 40, finished" in line
    line = StatusLine(now=0.0).update(dataclasses.replace(some, total_state_misses=30), 1.0)
    assert line is not None
    assert "free states 12 of 40 (30% had pages without a state), finished" in line


def test_an_idle_engine_says_nothing() -> None:
    status = StatusLine(now=0.0, period_s=10.0)
    assert status.update(dataclasses.replace(ZERO, step=5), 5.0) is None, "warm-ups are no work"
    stats = dataclasses.replace(ZERO, step=5, total_prompt_tokens=9)
    assert status.update(stats, 10.0) is not None
    assert status.update(stats, 20.0) is None
