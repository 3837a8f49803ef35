"""The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.weights import LayerContext


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, placement: LayerContext) -> None:
        super().__init__()
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, outputs, False, placement)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, "down_proj", False, placement)

    def forward(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """hidden + mlp(norm(hidden)), both [num_tokens, hidden_size]."""
        gated = self.gate_up_proj(hidden, norm_weight=norm.weight, eps=norm.eps, gated=True)
        return self.down_proj(gated, hidden)
