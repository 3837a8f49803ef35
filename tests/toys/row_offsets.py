"""A toy adapter: each row has a slot, and behind each MLP the vector of its slot is added to the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minisgl_backend.layers.norm import SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.models.decoder import CausalLM


class RowOffsets(nn.Module):
    """In the place of an MLP."""

    def __init__(self, mlp: Any, offsets: torch.Tensor) -> None:
        """offsets: [num_slots, hidden_size]."""
        super().__init__()
        self.mlp, self._offsets = mlp, offsets
        self.takes_o_proj = mlp.takes_o_proj

    def forward(self, residual: Residual, norms: SublayerNorms) -> Residual:
        settled, hidden = self.mlp(residual, norms).settled(None)
        assert settled.by_row is not None, "its passes have slots"
        return settled.become(hidden + self._offsets[settled.by_row])


def adapt(model: CausalLM, offsets: torch.Tensor) -> None:
    """All layers."""
    for layer in model.model.layers:
        layer.mlp = RowOffsets(layer.mlp, offsets)
