"""What steps take on this machine: some are executed before the first request, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import torch

from minisgl_backend.runner.model_runner import ModelRunner
from minisgl_backend.runner.start.memory import padding_plan, prompt_plan
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.state_plans import with_states
from minisgl_backend.step import StepPlan, StepTimes
from minisgl_backend.tensor_parallel import TensorParallel

ROUNDS = 3  # of which the fastest counts: the first may load kernels, and a busy host disturbs some
MOST_ROUNDS = 9  # while no two fastest agree
AGREE = 1.5  # times the fastest, that the second may take
TIMED_ROWS = (1, 32)
ENCODER_CALLS = 4  # timed together: a host launches the next one's kernels while a GPU computes
CONTEXT = 128  # tokens of each row that decodes


class StepTimer:
    """Its steps are on the padding page. All ranks have the same ones timed at the same time."""

    def __init__(
        self, runner: ModelRunner, runtime: RuntimeConfig, vocab_size: int, tp: TensorParallel | None = None
    ) -> None:
        self._runner, self._runtime = runner, runtime
        self._tp = tp or TensorParallel.single()
        self._max_running = runtime.config.max_running_requests
        # Equal tokens take less power, of which a large model's GEMMs never have enough, and all the same experts.
        self._ids = np.random.default_rng(0).integers(0, vocab_size, runtime.max_prefill_length, dtype=np.int32)
        self._beside = min(1, self._max_running - 1)  # without a stream it would be another pass, that of a lone prompt
        self._prompts: dict[int, float] = {}

    @property
    def longest(self) -> int:
        """The most prompt tokens of a step."""
        runtime = self._runtime
        return min(runtime.max_prefill_length, (self._max_running - self._beside) * (runtime.max_seq_len - 1))

    def time_prompts(self, num_tokens: int) -> float:
        """Seconds of a step of so many prompt tokens, beside one row that decodes."""
        plan = prompt_plan(self._ids[:num_tokens], self._max_running, self._runtime.max_seq_len, beside=self._beside)
        seconds = self._prompts[num_tokens] = self._time(plan)
        return seconds

    def times(self) -> StepTimes:
        """Of the prompts that have been timed, and of rows."""
        sizes = sorted({min(size, self._max_running) for size in TIMED_ROWS})
        rows = [(size, self._time_rows(size)) for size in sizes]
        prompts = [(0, rows[0][1]), *sorted(self._prompts.items())]
        return StepTimes(prompts=_rising(prompts), rows=_rising(rows), encoder=self._time_encoder())

    @torch.inference_mode()
    def _time_encoder(self) -> tuple[tuple[float, float], ...]:
        """`StepTimes.encoder`. A call's time rises with the patches that are attended to, by as much for each."""
        taken: dict[int, list[tuple[int, float]]] = {}  # by parts: patches seen, and seconds
        vectors = self._runner.vectors
        for call in () if vectors is None else vectors.timed_calls():
            seconds = self._fastest(partial(_repeated, call.run))
            taken.setdefault(call.parts, []).append((call.seen, seconds / ENCODER_CALLS))
        found = []
        for _, ((few, short), *more) in sorted(taken.items()):
            many, long = more[-1] if more else (few, short)
            of_seen = max(0.0, long - short) / (many - few) if more else short / few
            found.append((max(0.0, short - few * of_seen), of_seen))
        return tuple(found)

    def _time_rows(self, num_rows: int) -> float:
        plan = padding_plan((), (), np.arange(num_rows, dtype=np.int32))
        lengths = np.full(num_rows, min(CONTEXT, self._runtime.max_seq_len - 1), dtype=np.int32)
        return self._time(msgspec.structs.replace(plan, decode_lengths=lengths))

    def _time(self, plan: StepPlan) -> float:
        plan = with_states(plan, self._runner)
        return self._fastest(lambda: self._runner.execute(self._runner.prepare(plan)).wait())

    def _fastest(self, call: Callable[[], object]) -> float:
        """Seconds of ROUNDS or more, on all ranks: they must agree on what comes next."""
        taken: list[float] = []
        while len(taken) < MOST_ROUNDS:
            self._synchronize()
            started = time.perf_counter()
            call()
            self._synchronize()
            taken.append(time.perf_counter() - started)
            if len(taken) >= ROUNDS:
                best, second, *_ = sorted(taken)
                if self._tp.minimum(int(second <= AGREE * best)):
                    break
        return self._tp.minimum(round(1e6 * min(taken))) / 1e6

    def _synchronize(self) -> None:
        if self._runtime.device == "cuda":
            torch.cuda.synchronize()


def _rising(times: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Of ascending numbers: none takes longer than a larger one. What lies above was disturbed, which only adds."""
    lowest = np.minimum.accumulate([seconds for _, seconds in reversed(times)])[::-1].tolist()
    return tuple((number, seconds) for (number, _), seconds in zip(times, lowest, strict=True))


def _repeated(call: Callable[[], None]) -> None:
    for _ in range(ENCODER_CALLS):
        call()
