"""How many prompt tokens a step may compute beside running streams: from what a step costs on this machine.

Streams wait for the prompts that are computed beside their tokens (chunked prefill, Sarathi-Serve, Agrawal et al.
2024), so the budget is a time: it comes to thousands of tokens of a small model and to a few hundred of a large one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.memory import prompt_plan
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from minisgl_backend.step import Backlog
from minisgl_backend.tensor_parallel import TensorParallel

TARGET_S = 0.022  # a step of prompt tokens beside one stream; beside many it takes a little longer
SLOW_TARGET = 2.0  # times a step of one token, where that is more: the weights of a large model have to be read anyway
BACKLOG_FACTOR = 5  # how much longer steps may take while prompts wait
DEEP_BACKLOG_FACTOR = 24  # and while many do
ROUNDS = 3  # of which the fastest counts: the first may load kernels, and a busy host disturbs some
GIVEN_SIZES = (1, 32)  # that are timed where the budget is given: steps beside which other requests have a share
BACKLOG_S = 1.0  # of waiting prompts, at the pace beside streams


@dataclass(frozen=True)
class PrefillBudget:
    """What a step may have."""

    mixed_prefill_length: int
    backlog: Backlog | None  # what takes its place in a backlog; None: the user has set it
    step_seconds: tuple[tuple[int, float], ...]  # (prompt tokens, seconds) of the steps that were timed, ascending


def measure_prefill_budget(
    runner: ModelRunner, runtime: RuntimeConfig, vocab_size: int, tp: TensorParallel | None = None
) -> PrefillBudget:
    """A `mixed_prefill_length` that the user has set stays as it is.

    Executes a few steps on the padding page, so all ranks call it at the same time, before the first request.
    """
    config = runtime.config
    tp = tp or TensorParallel.single()

    max_running = config.max_running_requests
    # Equal tokens take less power, of which a large model's GEMMs never have enough, and all the same experts.
    ids = np.random.default_rng(0).integers(0, vocab_size, runtime.max_prefill_length, dtype=np.int32)
    beside = min(1, max_running - 1)  # without a stream it would be another pass, that of a lone prompt
    timed: dict[int, float] = {}

    def seconds(num_tokens: int) -> float:
        plan = prompt_plan(ids[:num_tokens], max_running, runtime.max_seq_len, beside=beside)
        best = float("inf")
        for _ in range(ROUNDS):
            _synchronize(runtime.device)
            started = time.perf_counter()
            runner.execute(runner.prepare(plan)).wait()
            _synchronize(runtime.device)
            best = min(best, time.perf_counter() - started)
        timed[num_tokens] = tp.minimum(round(1e6 * best)) / 1e6
        return timed[num_tokens]

    longest = min(runtime.max_prefill_length, (max_running - beside) * (runtime.max_seq_len - 1))
    budget, backlog = config.mixed_prefill_length, None
    if budget is None:
        budget, backlog = choose_prefill_budget(seconds, longest)
    else:
        for num_tokens in {min(size, longest) for size in GIVEN_SIZES}:
            seconds(num_tokens)
    return PrefillBudget(budget, backlog, tuple(sorted(timed.items())))


def choose_prefill_budget(seconds: Callable[[int], float], longest: int) -> tuple[int, Backlog]:
    """The budget where `seconds(num_tokens)` is what a step of so many prompt tokens takes; in whole tiles, if several.

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
    if 2 * TILE_TOKENS <= below < longest:  # from two on the planner fills tiles, and would leave out what is over
        below = min(longest, (below + TILE_TOKENS // 2) // TILE_TOKENS * TILE_TOKENS)
    return below, Backlog(
        waiting_tokens=int(below * BACKLOG_S / target),
        mixed_prefill_length=min(longest, BACKLOG_FACTOR * below),
        most_prefill_length=min(longest, DEEP_BACKLOG_FACTOR * below),
    )


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _sizes(longest: int) -> Iterator[int]:
    """32, 64, 128, 256, 384, 512, 768, 1,024, ... and `longest`."""
    size = 32
    while size < longest:
        yield size
        size += size if size <= 128 else 1 << (size.bit_length() - 2)
    yield longest
