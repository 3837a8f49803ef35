"""The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from torch import nn

from minisgl_backend.layers.config import MlpConfig
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext


class GatedMLP(nn.Module):
    def __init__(self, config: MlpConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        intermediate_size = config.intermediate_size
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, outputs, False, layer_context)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, "down_proj", False, layer_context)

    def derive_weights(self, product: RowParallelLinear, norm: RMSNorm) -> None:
        """To be called when all weights are loaded, with the product and the norm before this; nothing to do here."""

    def takes_product(self, num_tokens: int) -> bool:
        """Whether `forward` is to be given the product before this, of so many tokens, undone."""
        return False

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        """hidden + mlp(norm(hidden)), both [num_tokens, hidden_size]."""
        hidden, gated = self.gate_up_proj(residual, norm, gated=True)
        return self.down_proj(gated, hidden, residual.way)
