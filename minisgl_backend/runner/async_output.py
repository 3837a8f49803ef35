"""Asynchronous output: sampled tokens and log-probabilities from the device to a StepResult.

Copies run on their own stream, so that the next step need not wait for them, and the host waits for a step only in
`PendingStep.result`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_backend.arrays import NO_INT32, Float32Array
from minisgl_backend.runner.pooling import Pooled
from minisgl_backend.runner.step_tensors import StepTensors
from minisgl_backend.sampling.logprobs import unpack
from minisgl_backend.step import Logprobs, StepResult


@dataclass(frozen=True)
class Sampled:
    """What one step sampled, on the device."""

    # int32 [2, n or more]: the tokens; and 1 where the logits were sound, 0 where they were NaN or infinite.
    # The output of a graph includes its padding. After the n tokens follows the soundness of chunks that sample none.
    # For a proposer's step [num_proposed, num_proposing or more].
    token_ids: torch.Tensor
    logprobs: torch.Tensor | None  # int32 [k, 3 + 2 * top], see logprobs.pack


@dataclass(frozen=True)
class Computed:
    """A step up to its logits."""

    step: StepTensors
    logits: torch.Tensor | None  # [n, vocab_size]; None where nothing is sampled
    token_ids: torch.Tensor | None  # int32 [2, n or more], where a graph has sampled with the temperature only
    sound: torch.Tensor | None = None  # int32 [num_checked]  for chunks that sample nothing
    prompt_logprobs: tuple[torch.Tensor, ...] = ()
    pooled: Pooled | None = None


@dataclass(eq=False)
class PendingStep:
    """A launched step. It keeps the device tensors alive until their copies are done."""

    unsampled: ClassVar[Computed | None] = None  # the step's logits, while it waits for grammar masks
    _step: StepTensors
    _sources: list[torch.Tensor]
    _copies: list[torch.Tensor]  # tokens, log-probabilities if any, pooled values if any, prompt log-probabilities
    _event: torch.cuda.Event | None
    _pooled: Pooled | None = None

    def wait(self) -> None:
        """Waits for the end of the step without reading its results. Device errors surface here."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = []

    def result(self) -> StepResult:
        """Waits for the step's tokens. On rank 0: other ranks have no log-probabilities."""
        self.wait()
        # A graph's outputs are copied with their padding, since a slice would need another kernel.
        step, plan = self._step, self._step.plan
        if plan.num_proposed:
            proposed = self._copies[0].numpy()[:, : plan.num_proposing]
            return StepResult(plan.step, NO_INT32, proposed=proposed.T.copy())
        found = self._copies[0].numpy()[:, : step.num_sampled + len(step.checked_rows)]
        failed: list[int] = []
        if len(plan.draft_tokens):
            # Whatever is computed after a rejected draft is ignored, even if it is unsound.
            found = found.copy()
            found[1, : step.num_sampled] |= ~plan.accepted(found[0, : step.num_sampled])
        if not found[1].all():
            failed = [*plan.sampled_rows.tolist(), *step.checked_rows]
            failed = [row for row, sound in zip(failed, found[1].tolist(), strict=True) if not sound]
        return StepResult(
            step=plan.step,
            token_ids=found[0, : step.num_sampled].copy(),
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            failed_rows=frozenset(failed),
            pooled=self._pooled_vectors(),
        )

    def _logprobs(self) -> dict[int, Logprobs]:
        requested = self._step.logprobs
        if not requested:
            return {}
        packed = self._copies[1].numpy()
        return {index: unpack(row, top) for (index, top), row in zip(requested, packed, strict=True)}

    def _pooled_vectors(self) -> dict[int, Float32Array]:
        if self._pooled is None:
            return {}
        return self._pooled.by_row(self._copies[2 if self._step.logprobs else 1].numpy())

    def _prompt_logprobs(self) -> dict[int, list[Logprobs]]:
        requests = self._step.decisions.prompt_logprobs
        if not requests:
            return {}
        return {
            request.row: [unpack(row, request.top) for row in copy.numpy()]
            for request, copy in zip(requests, self._copies[-len(requests) :], strict=True)
        }


class UnsampledStep:
    """A launched step whose tokens wait for grammar masks: the device computes logits meanwhile."""

    def __init__(self, computed: Computed) -> None:
        self.unsampled: Computed | None = computed
        self._pending: PendingStep | None = None

    def begin(self, pending: PendingStep) -> None:
        """Its tokens are being sampled."""
        self.unsampled, self._pending = None, pending

    def wait(self) -> None:
        """See PendingStep."""
        if self._pending is not None:
            self._pending.wait()

    def result(self) -> StepResult:
        """See PendingStep."""
        if self._pending is None:
            raise RuntimeError("a step with grammars was not sampled")
        return self._pending.result()


class ResultReader:
    """Copies results to the host. One per runner."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_copy: torch.cuda.Event | None = None

    def start(self, computed: Computed, sampled: Sampled) -> PendingStep:
        """Starts copying the results that the current stream computes."""
        step, pooled = computed.step, computed.pooled
        sources = [sampled.token_ids, *([] if sampled.logprobs is None else [sampled.logprobs])]
        sources += [*([] if pooled is None else [pooled.values]), *computed.prompt_logprobs]
        if self._stream is None:
            return PendingStep(step, [], sources, None, pooled)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)
                for source in sources
            ]
            self._last_copy = torch.cuda.Event()
            self._last_copy.record()
        return PendingStep(step, sources, copies, self._last_copy, pooled)

    def protect_outputs(self) -> None:
        """Makes the current stream wait for the last copy: a graph is about to overwrite its static outputs."""
        if self._last_copy is not None:
            torch.cuda.current_stream().wait_event(self._last_copy)
