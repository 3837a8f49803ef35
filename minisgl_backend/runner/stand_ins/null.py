"""A runner that returns tokens without computing any, to measure everything else."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step that has its tokens already, and may be due later."""

    step: int
    token_ids: Int32Array  # [num_sampled]
    due: float  # time.monotonic() seconds
    log: BinaryIO | None = None
    unsampled: None = None

    def result(self) -> StepResult:
        delay = self.due - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        if self.log is not None:
            self.log.write(struct.pack("<d", time.monotonic()))
        return StepResult(self.step, self.token_ids)


class NullRunner:
    """Answers each step with tokens that depend on nothing but the position in the sequence.

    Args:
        token_ids: the answer of every sequence: position p gets token_ids[p % len(token_ids)]. Leave end-of-sequence
            tokens out.
        rate: tokens a second of each stream; 0: as fast as steps go.
        log_file: gets the time of each step's end, a little-endian float64 of time.monotonic() seconds.
    """

    def __init__(self, token_ids: Int32Array, rate: float = 0.0, log_file: Path | None = None) -> None:
        self._token_ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        self._interval = 1.0 / rate if rate > 0 else 0.0
        self._due = 0.0  # when the last step is through
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
        return NullStep(batch.step, tokens, self._due, self._log)
