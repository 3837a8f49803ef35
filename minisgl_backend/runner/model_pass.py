"""Passes of a model over tokens of the row table, outside captured pieces of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import AttentionPair, PairPlan, StepAttention
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput, Rotation
from minisgl_backend.runner.row_table import RowTable


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor: ...

    def scores(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def decode_logits(self, hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor: ...

    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None: ...

    def bind_states(self, states: StatePool) -> None: ...

    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None: ...

    def parameters(self) -> Iterable[torch.Tensor]: ...


class ModelPass:
    """Of the model, or of a draft model, with an attention of its own; both have the same rows."""

    def __init__(self, model: Model, attention: AttentionPair, table: RowTable) -> None:
        self._model, self._attention, self._table = model, attention, table

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, plan: PairPlan, **fields: Any) -> torch.Tensor:
        """The hidden states of the tokens at these places, int32 [num_tokens] each. fields: of `ForwardContext`."""
        return self.run(*self.input(rows, positions), plan, **fields)

    def input(
        self, rows: torch.Tensor, positions: torch.Tensor, shifts: torch.Tensor | None = None
    ) -> tuple[ModelInput, tuple[torch.Tensor, ...]]:
        """What the model is given of these tokens, and their slots by cache group. shifts: of `Rotation`."""
        token_ids, slots, turned = self._table.lookup_shifted(rows, positions, shifts)
        rotation = None if shifts is None else Rotation(turned, shifts=shifts)
        return ModelInput(token_ids, positions, rotation), slots

    def run(self, tokens: ModelInput, slots: tuple[torch.Tensor, ...], plan: PairPlan, **fields: Any) -> torch.Tensor:
        """Their hidden states."""
        ctx = ForwardContext(slots=slots, attention=StepAttention(self._attention, plan), **fields)
        return self._model.forward(tokens, ctx)
