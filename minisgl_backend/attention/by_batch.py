"""Decode by one backend for steps with few rows and short contexts, and by another for all others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionBackend, DecodeInputs, Plan, PrefillInputs
from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.attention.layer import AttentionLayer


@dataclass(frozen=True)
class _Plan:
    backend: AttentionBackend
    plan: Plan


class DecodeByBatchBackend(AttentionBackend):
    """Two backends of the same layers, which support CUDA graphs and do not fuse rope. The second serves prefill.

    A captured batch size has one graph for each backend that decodes some of its lengths.
    """

    supports_graphs = True

    def __init__(self, few: AttentionBackend, more: AttentionBackend, choice: DecodeByBatch) -> None:
        """choice: the steps that `few` decodes."""
        super().__init__(more.spec, more.group)
        self._few, self._more, self._choice = few, more, choice

    def _of(self, inputs: DecodeInputs) -> AttentionBackend:
        limit = self._choice.max_context_len(inputs.batch_size)
        if 0 < limit < math.inf and inputs.kv_lens_host.mean() > limit:
            return self._more
        return self._few if limit else self._more

    def plan_prefill(self, inputs: PrefillInputs) -> Plan:
        return self._more.plan_prefill(inputs)

    def prefill(self, layer: AttentionLayer, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        return self._more.prefill(layer, q, plan)

    def plan_decode(self, inputs: DecodeInputs) -> _Plan:
        backend = self._of(inputs)
        return _Plan(backend, backend.plan_decode(inputs))

    def decode(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan) -> torch.Tensor:
        return plan.backend.decode(layer, q, plan.plan)

    def decode_into(self, layer: AttentionLayer, q: torch.Tensor, plan: _Plan, out: torch.Tensor) -> None:
        plan.backend.decode_into(layer, q, plan.plan, out)

    def decode_batches(self, max_batch: int) -> tuple[int, ...]:
        most = self._choice.rows
        more = (max(batch, most + 1) for batch in self._more.decode_batches(max_batch) if max_batch > most)
        return tuple(sorted({*self._few.decode_batches(min(max_batch, most)), *more}))

    def length_bounds(self, batch_size: int) -> tuple[int, ...]:
        limit = self._choice.max_context_len(batch_size)
        return (int(limit),) if 0 < limit < self.spec.max_seq_len else ()

    def allocate_graph(self, max_batch_size: int) -> None:
        self._few.allocate_graph(min(max_batch_size, self._choice.rows))
        self._more.allocate_graph(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        backend = self._of(inputs)
        return _Plan(backend, backend.plan_capture(inputs))

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._of(inputs).plan_replay(inputs)
