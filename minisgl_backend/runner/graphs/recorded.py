"""Decode steps of a CPU, recorded when a size is first computed and replayed afterwards."""

from __future__ import annotations

import logging

import torch

from minisgl_backend.attention.base import DecodeInputs
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.recording import Recording
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import DecodeOutputs, DecodeParts, DecodeSteps, GraphRunner

log = logging.getLogger(__name__)


class RecordedGraphRunner(GraphRunner):
    """Every batch size is one of its sizes: padding would be computed. Python samples the tokens, whose parameters it
    looks at, and computes the whole step where a model's code does so."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes)
        self._recorded: dict[int, tuple[Recording, torch.Tensor]] = {}
        self._refuses = False
        self._parts: DecodeParts  # of `capture`
        self._decode: DecodeInputs  # of `plan_replay`

    @property
    def sampling_sizes(self) -> tuple[int, ...]:
        return ()

    def capture(self, steps: DecodeSteps, builder: BatchBuilder, attention: AttentionPair) -> None:
        assert steps.parts is not None, "of a model"
        self._parts, self._attention = steps.parts, attention

    def plan_replay(self, decode: DecodeInputs) -> None:
        self._decode = decode

    def replay(self, size: int, *, has_drafts: bool = False) -> DecodeOutputs:
        return self._parts.sample(self._decode, self._logits(size))

    def _logits(self, size: int) -> torch.Tensor:
        """[size, vocab_size]"""
        if size in self._recorded:
            recording, logits = self._recorded[size]
            recording.replay()
            return logits
        plan = self._attention.plan(None, self._decode)
        if self._refuses:
            return self._parts.logits(self._decode, plan)
        library = cpu_library()
        assert library is not None, "steps without its kernels are not recorded"
        with Recording(library) as recording:
            logits = self._parts.logits(self._decode, plan)
        if recording.refusal is None and recording.repeats(logits):
            self._recorded[size] = recording, logits
            return logits
        log.info("decode steps are not recorded: %s", recording.refusal or "they do not repeat themselves")
        self._refuses = True
        # A replay that computes another thing has overwritten the logits, and its tokens' keys and values.
        return logits if recording.refusal is not None else self._logits(size)

    def replay_sampling(self, size: int, sampling_graph: int) -> None:
        raise AssertionError("it has no sampling graphs")

    def close(self) -> None:
        self._recorded.clear()
