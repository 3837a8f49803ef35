"""A runner that returns given tokens, so that tests can script the model's output under the real stack."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.runner.stand_ins.null import NullStep, NullVectors
from minisgl_backend.step import StepPlan


class ScriptedRunner:
    """Answers a request with seed k with script k, and with the last one where there are fewer.

    Args:
        scripts: token ids int32 [num_tokens] each, usually with an end-of-sequence token at the end. A script
            repeats for ever.
        rate: tokens per second of each stream; 0: as fast as possible.
    """

    def __init__(self, scripts: Sequence[Int32Array], rate: float = 0.0) -> None:
        self._scripts = [np.ascontiguousarray(script, dtype=np.int32) for script in scripts]
        self._interval = 1.0 / rate if rate > 0 else 0.0
        self._due = 0.0
        self._vectors = NullVectors()
        self._rows: dict[int, tuple[Int32Array, int]] = {}  # row -> its script, the prompt's length

    def prepare(self, plan: StepPlan) -> StepPlan:
        return plan

    def execute(self, batch: StepPlan) -> NullStep:
        for admitted in batch.admitted:
            script = self._scripts[min(admitted.params.seed or 0, len(self._scripts) - 1)]
            self._rows[admitted.row] = script, admitted.prompt_len
        ends = [(chunk.row, chunk.end) for chunk in batch.prefill if chunk.samples]
        ends += zip(batch.decode_rows.tolist(), batch.decode_lengths.tolist(), strict=True)
        tokens = np.array([self._token(row, end) for row, end in ends], dtype=np.int32)
        if self._interval:
            self._due = max(self._due, time.monotonic()) + self._interval
        return NullStep(batch.step, tokens, self._due, pooled=self._vectors.of(batch))

    def sample(self, pending: NullStep, masks: object) -> None:
        raise RuntimeError("a scripted step has its tokens already")

    def grammar_bitmask(self, count: int) -> Int32Array:
        raise RuntimeError("a scripted step has its tokens already")

    def _token(self, row: int, end: int) -> int:
        script, prompt_len = self._rows[row]
        return int(script[(end - prompt_len) % len(script)])
