"""A runner that returns tokens without a model, to benchmark everything else."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minisgl_backend.arrays import Float32Array, Int32Array
from minisgl_backend.request import PoolingParams
from minisgl_backend.step import StepPlan, StepResult

VECTOR_WIDTH = 8


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step whose tokens are known already; its result may be due later."""

    step: int
    token_ids: Int32Array  # [num_sampled]
    due: float  # time.monotonic() seconds
    log: BinaryIO | None = None
    unsampled: None = None
    pooled: dict[int, Float32Array] = field(default_factory=dict)

    def result(self) -> StepResult:
        delay = self.due - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        if self.log is not None:
            self.log.write(struct.pack("<d", time.monotonic()))
        return StepResult(self.step, self.token_ids, pooled=self.pooled)


class NullVectors:
    """Results of pooled chunks: vectors of ones, and the log-probability -1 for each requested token."""

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}  # by row

    def of(self, plan: StepPlan) -> dict[int, Float32Array]:
        """Plans come in order."""
        self._widths.update((one.row, _width(one.pooling)) for one in plan.admitted)
        return {chunk.row: self._vector(self._widths[chunk.row]) for chunk in plan.prefill if chunk.pools}

    def _vector(self, num_tokens: int) -> Float32Array:
        return np.full(num_tokens, -1.0, np.float32) if num_tokens else np.ones(VECTOR_WIDTH, np.float32)


def _width(pooling: PoolingParams | None) -> int:
    return 0 if pooling is None else len(pooling.token_ids)


class NullRunner:
    """Answers each step with tokens that only depend on the position in the sequence.

    Args:
        token_ids: the answer of every sequence: position p gets token_ids[p % len(token_ids)]. Leave end-of-sequence
            tokens out.
        rate: tokens per second of each stream; 0: as fast as possible.
        log_file: receives the time of each step's end, a little-endian float64 of time.monotonic() seconds.
    """

    def __init__(self, token_ids: Int32Array, rate: float = 0.0, log_file: Path | None = None) -> None:
        self._token_ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        self._interval = 1.0 / rate if rate > 0 else 0.0
        self._due = 0.0  # when the last step ends
        self._vectors = NullVectors()
        self._log: BinaryIO | None = None if log_file is None else log_file.open("wb", buffering=0)

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(self, pending: NullStep, masks: object) -> None:
        raise RuntimeError("a null step has its tokens already")

    def grammar_bitmask(self, count: int) -> Int32Array:
        raise RuntimeError("a null step has its tokens already")

    def execute(self, batch: StepPlan) -> NullStep:
        ends = batch.decode_lengths
        if batch.prefill:
            chunks = np.array([chunk.end for chunk in batch.prefill if chunk.samples], dtype=np.int32)
            ends = np.concatenate([chunks, ends])
        tokens = self._token_ids.take(ends, mode="wrap")
        if self._interval:
            self._due = max(self._due, time.monotonic()) + self._interval
        return NullStep(batch.step, tokens, self._due, self._log, pooled=self._vectors.of(batch))
