"""Warm-up: steps that a runner executes before its first request, so that no request waits for one-time work.

Triton kernels are compiled for each shape of launch, which takes seconds the first time on a machine: so they are
compiled before anything else in a start, several at a time (`compile_kernels`). The steps here launch every kernel that
serving can need, on each side of each number of rows or tokens from which on other kernels are used. Libraries load
their kernels at the first GEMM of a size. For decode steps the capture of graphs has done that; for steps with a prompt
part `warm_up` does it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import pairwise, takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from minisgl_backend.request import Grammar, SamplingParams
from minisgl_backend.runner.async_output import UnsampledStep
from minisgl_backend.runner.graphs.whole import graph_sizes
from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.compiling import compiles_ahead, compiling_ahead
from minisgl_backend.runner.start.memory import (
    LARGEST_DEFAULT_GRAPH,
    PLAIN_PARAMS,
    padding_plan,
    prompt_plan,
    proposer_plan,
)
from minisgl_backend.runner.start.state_plans import with_states
from minisgl_backend.step import AdmittedRow, PrefillChunk, StepPlan, Wants

log = logging.getLogger(__name__)

# Tokens of a prompt in a step with one decoding sequence: about the sizes for which GEMMs use other kernels.
PROMPT_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)

# Tokens of a prompt without decoding sequences: small GEMMs have another tiling or padding from each of these numbers
# on. `sampled_plans` have 2 tokens, and PROMPT_TOKENS more.
FEW_TOKENS = (1, 3, 5, 9)

# Together these launch every kernel of the sampler.
SAMPLED = (
    SamplingParams(temperature=1.0, seed=0, top_k=20, min_p=0.1, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=0, top_p=0.9, logit_bias={0: 1.0}, presence_penalty=1.0),
    SamplingParams(temperature=1.0, seed=0, grammar=Grammar(kind="json")),
)


class StepLimits(NamedTuple):
    """What a step can have: rows, prompt tokens, tokens of a row."""

    max_running: int
    max_prefill: int
    max_seq_len: int
    counts: Sequence[int] = ()  # numbers of tokens, ascending, from each of which on the model uses other kernels

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt in a step."""
        return min(self.max_prefill, self.max_seq_len - 1)


def compile_kernels(runner: ModelRunner, limits: StepLimits) -> None:
    """Compiles the kernels of a start's steps, unless Triton's cache has them."""
    if not compiles_ahead():
        return
    started = time.monotonic()
    decoding = runner.attention.decode_batches(limits.max_running)
    first, *others = warm_up_plans(limits, decoding)
    with compiling_ahead() as done:
        _execute(runner, first)
    if not done.count:
        return  # the cache has the kernels of an earlier start like this one
    count = done.count
    with compiling_ahead() as done:
        # The sampler's kernels take the longest.
        plans = (*sampled_plans(limits.longest), *others, *decode_plans(limits.max_running, decoding))
        for plan in (*plans, *proposer_plans(runner, limits.longest)):
            _execute(runner, plan)
    log.info("%d kernels compiled in %.1f s", count + done.count, time.monotonic() - started)


def warm_up(runner: ModelRunner, limits: StepLimits) -> None:
    """Executes steps of the common shapes."""
    started = time.monotonic()
    plans = warm_up_plans(limits, runner.attention.decode_batches(limits.max_running))
    for plan in (*plans, *sampled_plans(limits.longest), *proposer_plans(runner, limits.longest)):
        _execute(runner, plan)
    log.info("mixed steps warmed up in %.1f s", time.monotonic() - started)


def _execute(runner: ModelRunner, plan: StepPlan) -> None:
    pending = runner.execute(runner.prepare(with_states(plan, runner)))
    if isinstance(pending, UnsampledStep):
        runner.sample(pending, runner.no_masks(1))
    pending.wait()


def sampled_plans(longest: int) -> list[StepPlan]:
    """A short prompt with each of SAMPLED."""
    return [_plan(min(2, longest), 0, params) for params in SAMPLED]


def proposer_plans(runner: ModelRunner, longest: int) -> list[StepPlan]:
    """Steps of the proposer, where there is one, after prompts of common sizes."""
    return [proposer_plan(count) for count in PROMPT_TOKENS if count <= longest] if runner.proposes else []


def decode_plans(max_running: int, decoding: Sequence[int]) -> list[StepPlan]:
    """Decode steps of the captured sizes, of those in `decoding`, and of all rows."""
    sizes = dict.fromkeys((*graph_sizes(min(max_running, LARGEST_DEFAULT_GRAPH)), *decoding, max_running))
    return [padding_plan((), (), np.arange(size, dtype=np.int32)) for size in sizes]


def warm_up_plans(limits: StepLimits, decoding: Sequence[int] = (1,)) -> list[StepPlan]:
    """Steps in which row 0 has a prompt, and the rows after it decode their first token. The largest comes first: the
    others reuse its memory.

    decoding: numbers of decoding rows, ascending, see AttentionBackend.decode_batches. Of `limits.counts`, those that
    no other plan reaches get a step of prompts only, or one with all rows where prompts cannot have that many tokens.
    """
    max_running, max_prefill, max_seq_len, counts = limits
    longest = limits.longest
    decoding = [0, *takewhile(lambda rows: rows < max_running, decoding)]
    tokens = list(takewhile(lambda count: count <= longest, PROMPT_TOKENS)) or [longest]
    shapes = [(count, 0) for count in FEW_TOKENS if count < tokens[0]]
    shapes += [(tokens[0], rows) for rows in decoding]
    shapes += [(count, decoding[min(1, len(decoding) - 1)]) for count in tokens[1:]]
    plans = [(sum(shape), _plan(*shape)) for shape in shapes]
    sizes, prompts = [size for size, _ in plans], min(max_prefill, max_running * (max_seq_len - 1))
    most = longest + max_running - 1
    for count, following in pairwise((*counts, max(prompts, most) + 1)):
        if any(count <= size < following for size in sizes):
            continue
        if count <= prompts:
            plans.append((count, prompt_plan(np.zeros(count, np.int32), max_running, max_seq_len)))
        elif count <= most:
            rows = min(max_running, count) - 1
            plans.append((count, _plan(count - rows, rows)))
    return [plan for _, plan in sorted(plans, key=itemgetter(0), reverse=True)]


def _plan(prompt_tokens: int, decoding: int, params: SamplingParams = PLAIN_PARAMS) -> StepPlan:
    prompt, one = np.zeros(prompt_tokens, np.int32), np.zeros(1, np.int32)
    decode_rows = np.arange(1, 1 + decoding, dtype=np.int32)
    admitted = [AdmittedRow(0, 0, params, prompt_tokens, prompt, 0)]
    admitted += [AdmittedRow(row, row, PLAIN_PARAMS, 1, one, 0) for row in decode_rows.tolist()]
    return padding_plan(tuple(admitted), (PrefillChunk(0, 0, prompt, Wants.TOKEN),), decode_rows)
