"""What a start executes before the first request, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from tiny_runner import GREEDY, MAX_SEQ_LEN, PROMPTS, MakeRunner, generate

from minisgl_backend.runner.start.compiling import Compilations
from minisgl_backend.runner.start.warm_up import SAMPLED as SAMPLED_AT_START
from minisgl_backend.runner.start.warm_up import StepLimits, compile_kernels, warm_up, warm_up_plans
from minisgl_backend.step import StepPlan


def test_a_runner_that_warmed_up_has_forgotten_it(make_runner: MakeRunner, expected: list[list[int]]) -> None:
    runner = make_runner(graph_sizes=(1, 6), pieces=(64,))
    warm_up(runner, StepLimits(6, 100, MAX_SEQ_LEN))
    assert not runner._pool.layer(0).k[1:].any(), "only the padding page was written"
    assert generate(runner, PROMPTS, [GREEDY] * 4) == expected


@pytest.mark.parametrize("is_cached", [True, False])
def test_kernels_are_compiled_with_the_steps_of_a_start(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """Nothing but the first step is executed where the compiler's cache has its kernels."""
    runner, done, executed = make_runner(), Compilations(), []
    done.note(cache_hit=is_cached)
    prepare = runner.prepare

    def noted(plan: StepPlan) -> object:
        executed.append(plan)
        return prepare(plan)

    monkeypatch.setattr(runner, "prepare", noted)
    monkeypatch.setattr("minisgl_backend.runner.start.warm_up.compiles_ahead", lambda: True)
    monkeypatch.setattr("minisgl_backend.runner.start.warm_up.compiling_ahead", lambda: contextlib.nullcontext(done))
    compile_kernels(runner, StepLimits(6, 100, MAX_SEQ_LEN))
    decoding = {len(plan.decode_rows) for plan in executed if not plan.prefill}
    asked = [plan.admitted[0].params for plan in executed if plan.admitted]
    assert len(executed) == 1 if is_cached else decoding == {1, 2, 4, 6}
    assert is_cached or all(params in asked for params in SAMPLED_AT_START)


@pytest.mark.parametrize(("max_running", "max_prefill", "max_seq_len"), [(1, 1, 2), (2, 16, 64), (256, 8192, 4096)])
def test_warming_up_stays_within_the_limits(max_running: int, max_prefill: int, max_seq_len: int) -> None:
    plans = warm_up_plans(StepLimits(max_running, max_prefill, max_seq_len))
    assert plans
    for plan in plans:
        assert len(plan.prefill[0].token_ids) <= min(max_prefill, max_seq_len - 1)
        assert {0, *plan.decode_rows.tolist()} <= set(range(max_running))
        assert len(plan.admitted) == 1 + len(plan.decode_rows)


@pytest.mark.parametrize(("max_running", "max_seq_len"), [(256, 4096), (4, 128)])
def test_warming_up_reaches_each_number_of_tokens_that_changes_kernels(max_running: int, max_seq_len: int) -> None:
    counts = (65, 257, 410, 615, 2458, 6001)
    plans = warm_up_plans(StepLimits(max_running, 8192, max_seq_len, counts))
    sizes = [sum(len(chunk.token_ids) for chunk in plan.prefill) + len(plan.decode_rows) for plan in plans]
    most = max_running * (max_seq_len - 1)
    for count, following in itertools.pairwise((*counts, 8193)):
        assert count > most or any(count <= size < following for size in sizes), count
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 3, 5, 9} <= set(sizes)
