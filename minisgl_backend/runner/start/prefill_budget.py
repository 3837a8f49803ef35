"""Prefill budget of mixed steps: how many prompt tokens a step may compute together with decoding sequences.

Decoding waits for the prompt tokens in its step (chunked prefill, Sarathi-Serve, Agrawal et al. 2024), so the budget is
a time, measured on this machine: thousands of tokens for a small model, and a few hundred for a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from minisgl_backend.runner.start.step_timer import StepTimer
from minisgl_backend.step import Backlog, StepTimes
from minisgl_backend.tensor_parallel import TensorParallel

TARGET_S = 0.022  # a step of prompt tokens and one decoding sequence; with many it takes a little longer
SLOW_TARGET = 2.0  # times a step of one token, where that is longer: a large model's weights have to be read anyway
BACKLOG_FACTOR = 5  # how much longer steps may take while prompts wait
DEEP_BACKLOG_FACTOR = 24  # and while many prompts wait
GIVEN_SIZES = (1, 32)  # token counts that are timed where the user sets the budget
BACKLOG_S = 1.0  # backlog of waiting prompts, in seconds at the pace of mixed steps


@dataclass(frozen=True)
class PrefillBudget:
    """Limits of the prompt tokens of a step."""

    mixed_prefill_length: int
    backlog: Backlog | None  # limits that replace it in a backlog; None: the user has set it
    step_times: StepTimes


def measure_prefill_budget(
    runner: ModelRunner, runtime: RuntimeConfig, vocab_size: int, tp: TensorParallel | None = None
) -> PrefillBudget:
    """Measures the prefill budget, unless the user has set `mixed_prefill_length`.

    Executes a few steps on the padding page, so all ranks call it at the same time, before the first request.
    """
    timer = StepTimer(runner, runtime, vocab_size, tp)
    budget, backlog = runtime.config.mixed_prefill_length, None
    if budget is None:
        budget, backlog = choose_prefill_budget(timer.time_prompts, timer.longest)
    else:
        for num_tokens in {min(size, timer.longest) for size in GIVEN_SIZES}:
            timer.time_prompts(num_tokens)
    return PrefillBudget(budget, backlog, timer.times())


def choose_prefill_budget(seconds: Callable[[int], float], longest: int) -> tuple[int, Backlog]:
    """The budget in tokens, in whole GEMM tiles if it has several; `seconds(num_tokens)` times a step of prompt tokens.

    `longest`: the most tokens that a step can have.
    """
    one = seconds(1)
    target = max(TARGET_S, SLOW_TARGET * one)
    below, time_below = 1, one
    for num_tokens in _sizes(longest):
        taken = seconds(num_tokens)
        if taken > target:
            share = (target - time_below) / max(taken - time_below, 1e-9)
            below += int(share * (num_tokens - below))
            break
        below, time_below = num_tokens, taken
    if 2 * TILE_TOKENS <= below < longest:  # from two tiles on the planner fills tiles, and would not use a remainder
        below = min(longest, (below + TILE_TOKENS // 2) // TILE_TOKENS * TILE_TOKENS)
    return below, Backlog(
        waiting_tokens=int(below * BACKLOG_S / target),
        mixed_prefill_length=min(longest, BACKLOG_FACTOR * below),
        most_prefill_length=min(longest, DEEP_BACKLOG_FACTOR * below),
    )


def _sizes(longest: int) -> Iterator[int]:
    """32, 64, 128, 256, 384, 512, 768, 1,024, ... and `longest`."""
    size = 32
    while size < longest:
        yield size
        size += size if size <= 128 else 1 << (size.bit_length() - 2)
    yield longest
