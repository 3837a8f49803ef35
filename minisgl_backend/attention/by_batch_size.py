"""Decode by one backend for steps with few rows, and by another for more: each captured batch size has one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.base import AttentionBackend, DecodeInputs, Plan, PrefillInputs
from minisgl_backend.attention.layer import AttentionLayer


@dataclass(frozen=True)
class _Plan:
    backend: AttentionBackend
    plan: Plan


class BackendByBatchSize(AttentionBackend):
    """Two backends of the same layers, which support CUDA graphs and do not fuse rope. The second serves prefill."""

    def __init__(self, few: AttentionBackend, more: AttentionBackend, most_few: int) -> None:
        """most_few: rows up to which `few` decodes."""
        super().__init__(more.spec, more.group)
        self._few, self._more, self._most_few = few, more, most_few

    def _of(self, inputs: DecodeInputs) -> AttentionBackend:
        return self._few if inputs.batch_size <= self._most_few else self._more

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
        most = self._most_few
        more = (max(batch, most + 1) for batch in self._more.decode_batches(max_batch) if max_batch > most)
        return tuple(sorted({*self._few.decode_batches(min(max_batch, most)), *more}))

    def allocate_graph(self, max_batch_size: int) -> None:
        self._few.allocate_graph(min(max_batch_size, self._most_few))
        self._more.allocate_graph(max_batch_size)

    def plan_capture(self, inputs: DecodeInputs) -> _Plan:
        backend = self._of(inputs)
        return _Plan(backend, backend.plan_capture(inputs))

    def plan_replay(self, inputs: DecodeInputs) -> None:
        self._of(inputs).plan_replay(inputs)
