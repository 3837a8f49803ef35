"""Host time of a decode step: plan, the host part of prepare, commit and outputs, with a runner that computes nothing.

    python -m benchmarks.scheduler [--json] [--sizes 1,64,256,1024] [--steps 50] [--repeats 40] [--profile 256]
    python -m benchmarks.scheduler --churn 256       requests that come and go, instead of streams that only decode

Each size runs that many sequences at different lengths, so that in every step some of them need a new page. Reported is
the lowest of the repeats' means, each over few steps: other load on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.runner.stand_ins.null import NullRunner
from minisgl_backend.runner.start.step_sizes import TILE_TOKENS
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.scheduler.limits import SchedulerLimits
from minisgl_backend.scheduler.scheduler import Scheduler
from minisgl_backend.step import StepPlan

STAGES = ("plan", "prepare", "commit", "outputs")
PROMPT_LEN = 48
VOCAB_SIZE = 32_000
GRAPH_SIZES = (1, 2, 4, *range(8, 1025, 8))


@dataclass(frozen=True)
class Setting:
    """One loop to be measured."""

    scheduler: Scheduler
    builder: BatchBuilder
    runner: NullRunner


def make_setting(num_sequences: int, num_steps: int, page_size: int) -> Setting:
    """A scheduler whose sequences all decode, and go on for at least `num_steps`."""
    longest = PROMPT_LEN + 16 + num_steps + 64
    limits = _limits(num_sequences, page_size, longest, waiting=num_sequences)
    device = torch.device("cpu")
    table = RowTable(max_running=num_sequences, max_seq_len=4096, page_size=page_size, device=device)
    builder = BatchBuilder(
        table, SamplingRows(table.max_rows, VOCAB_SIZE, limits.eos_token_ids, limits.max_seq_len, device)
    )
    setting = Setting(Scheduler(limits, seed=0), builder, NullRunner(np.arange(100, 900, dtype=np.int32)))
    rng = np.random.default_rng(0)
    for uid in range(num_sequences):
        prompt = rng.integers(3, VOCAB_SIZE, PROMPT_LEN + uid % 16, dtype=np.int32)
        params = SamplingParams(max_tokens=longest - len(prompt), ignore_eos=uid % 2 == 0)
        setting.scheduler.add(Request(uid=uid, token_ids=prompt.tobytes(), params=params))
    times = [0.0] * len(STAGES)
    while len(step(setting, times).decode_rows) < num_sequences:
        pass
    return setting


def _limits(num_sequences: int, page_size: int, longest: int, waiting: int) -> SchedulerLimits:
    return SchedulerLimits(
        page_size=page_size,
        num_pages=num_sequences * -(-longest // page_size),
        max_seq_len=4096,
        max_running_requests=num_sequences,
        max_waiting_requests=waiting,
        max_prefill_length=8192,
        mixed_prefill_length=512,
        tile_tokens=TILE_TOKENS,
        eos_token_ids=(2,),
    )


def step(setting: Setting, times: list[float]) -> StepPlan:
    """One decode step; adds each stage's seconds to `times`. The null runner's own time is not counted."""
    clock = time.perf_counter
    start = clock()
    plan = setting.scheduler.plan()
    planned = clock()
    assert plan is not None, "every sequence can go on"
    setting.builder.build_host(plan, GRAPH_SIZES)
    prepared = clock()
    result = setting.runner.execute(plan).result()
    executed = clock()
    setting.scheduler.commit(plan, result)
    committed = clock()
    setting.scheduler.drain_outputs()
    taken = clock()
    for index, seconds in enumerate((planned - start, prepared - planned, committed - executed, taken - committed)):
        times[index] += seconds
    return plan


def measure(num_sequences: int, num_steps: int, repeats: int, page_size: int) -> dict[str, float]:
    """Microseconds a step: of each stage in the best repeat, and their sum as "total"."""
    setting = make_setting(num_sequences, num_steps * repeats, page_size)
    best: list[float] = []
    for _ in range(repeats):
        times = [0.0] * len(STAGES)
        for _ in range(num_steps):
            step(setting, times)
        if not best or sum(times) < sum(best):
            best = times
    figures = {stage: seconds / num_steps * 1e6 for stage, seconds in zip(STAGES, best, strict=True)}
    return {**figures, "total": sum(figures.values())}


def churn(num_sequences: int, page_size: int, num_requests: int = 4000, repeats: int = 5) -> tuple[float, float]:
    """Requests of 100 prompt and 32 to 95 answer tokens through plan and commit.

    Returns microseconds of CPU time a step, and requests a step.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(32, 96, num_requests).tolist()
    prompts = rng.integers(3, VOCAB_SIZE, (num_requests, 100), dtype=np.int32)
    best, num_steps = float("inf"), 1
    for _ in range(repeats):
        scheduler = Scheduler(
            _limits(num_sequences, page_size, longest=208, waiting=num_requests),
            seed=0,
        )
        runner, spent, num_steps = NullRunner(np.arange(100, 900, dtype=np.int32)), 0.0, 0
        start = time.thread_time()
        for uid, length in enumerate(lengths):
            scheduler.add(Request(uid=uid, token_ids=prompts[uid].tobytes(), params=SamplingParams(max_tokens=length)))
        spent += time.thread_time() - start
        while True:
            start = time.thread_time()
            plan = scheduler.plan()
            if plan is None:
                break
            spent += time.thread_time() - start
            result = runner.execute(plan).result()
            start = time.thread_time()
            scheduler.commit(plan, result)
            scheduler.drain_outputs()
            spent += time.thread_time() - start
            num_steps += 1
        best = min(best, spent)
    return best / num_steps * 1e6, num_requests / num_steps


def profile(num_sequences: int, num_steps: int, page_size: int) -> None:
    """Prints where the time goes, function by function."""
    setting = make_setting(num_sequences, num_steps, page_size)
    profiler = cProfile.Profile()
    times = [0.0] * len(STAGES)
    run: Callable[[], object] = lambda: [step(setting, times) for _ in range(num_steps)]  # noqa: E731
    profiler.runcall(run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host microseconds of a decode step.")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--sizes", default="1,64,256,1024", help="numbers of running sequences")
    parser.add_argument("--steps", type=int, default=50, help="steps of a repeat")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--profile", type=int, metavar="SEQUENCES", help="profile this many sequences instead")
    parser.add_argument("--churn", type=int, metavar="SEQUENCES", help="short requests, this many at a time, instead")
    arguments = parser.parse_args()
    if arguments.churn:
        microseconds, requests = churn(arguments.churn, arguments.page_size)
        print(f"{microseconds:.1f} us of CPU time a step with {requests:.2f} requests a step that come and go")
        return
    if arguments.profile:
        profile(arguments.profile, arguments.steps * arguments.repeats, arguments.page_size)
        return
    sizes = [int(size) for size in arguments.sizes.split(",")]
    print(f"{'sequences':>9} " + " ".join(f"{name:>9}" for name in (*STAGES, "total")) + "   us a step")
    totals = {}
    for size in sizes:
        figures = measure(size, arguments.steps, arguments.repeats, arguments.page_size)
        totals[str(size)] = round(figures["total"], 1)
        print(f"{size:>9} " + " ".join(f"{value:>9.1f}" for value in figures.values()), flush=True)
    if arguments.json:
        print(json.dumps({"us_per_step": totals}))


if __name__ == "__main__":
    main()
