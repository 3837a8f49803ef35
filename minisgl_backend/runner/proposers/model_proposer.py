"""What proposers with layers of their own share: the model of these, its attention, and its captured passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch

from minisgl_backend.kv.pool import KVPool
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.draft_head import DraftHead
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import DecodeSteps, GraphRunner
from minisgl_backend.runner.proposers.context import ProposerContext
from minisgl_backend.runner.proposers.proposer import DeviceProposer


class ModelProposer(DeviceProposer):
    """Reads and writes the target's table of rows, and samples as the target will."""

    def __init__(self, context: ProposerContext, model: CausalLM | DraftHead) -> None:
        self._layers, self._attention = model, context.draft_attention()
        super().__init__(self._attention.spec)
        self._table, self._sample = context.rows.table, context.sample

    @abstractmethod
    def _passes(self) -> DecodeSteps:
        """What is captured."""

    def bind(self, pool: KVPool, builder: BatchBuilder) -> None:
        self._builder = builder
        self._layers.bind_attention(self._attention.spec, pool)

    def prepare(self, graphs: GraphRunner | None, longest_prefill: int) -> None:
        self._layers.prepare(() if graphs is None else graphs.sizes, longest_prefill)
        if graphs is not None:
            graphs.capture(self._passes(), self._builder, self._attention)
            self._graphs = graphs

    def parameters(self) -> Iterable[torch.Tensor]:
        return self._layers.parameters()
