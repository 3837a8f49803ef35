"""The gated MLP, down(activation(gate(x)) * up(x)) (SwiGLU and GeGLU, Shazeer 2020), and the one without a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_backend.kernels.torch_ops import activate
from minisgl_backend.layers.config import DenseMlpConfig, MlpConfig, UngatedMlpConfig
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class DenseMLP(nn.Module):
    """A projection up, an activation, and a projection down."""

    outputs: tuple[str, ...] = ("up_proj",)  # of `up_proj`
    fused_activation: str | None = None  # that `up_proj` applies
    feeds: object = None  # what results of `up_proj` are multiplied with: see `GemmCall`

    def __init__(self, config: DenseMlpConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        size, bias = config.intermediate_size, config.bias
        self.up_proj = ColumnParallelLinear(hidden_size, dict.fromkeys(self.outputs, size), bias, layer_context)
        self.down_proj = RowParallelLinear(size, hidden_size, "down_proj", bias, layer_context)

    def derive_weights(self, o_proj: RowParallelLinear, norms: SublayerNorms) -> None:
        """Called when all weights are loaded, with the preceding o_proj and this MLP's norms; nothing to do."""

    def takes_o_proj(self, num_tokens: int) -> bool:
        """Whether this MLP runs the preceding o_proj itself (deferred), at this token count."""
        return False

    def forward(self, residual: Residual, norms: SublayerNorms) -> Residual:
        """The residual stream plus mlp(norm(residual)), [num_tokens, hidden_size]."""
        residual, up = self.up_proj(residual, norms.before, activation=self.fused_activation, feeds=self.feeds)
        return self.down_proj(residual, self.activated(up), norms)

    def part(self, x: torch.Tensor, added_to: torch.Tensor | None, slots: torch.Tensor | None = None) -> torch.Tensor:
        """x, added_to [num_tokens, hidden_size] -> added_to plus this rank's part of mlp(x). slots: of adapters."""
        up = self.up_proj.of(x, activation=self.fused_activation, slots=slots)
        return self.down_proj.part(self.activated(up), added_to, slots)

    def activated(self, up: torch.Tensor) -> torch.Tensor:
        """What is left to do with the outputs of `up_proj`."""
        return up


class GatedMLP(DenseMLP):
    outputs = ("gate_proj", "up_proj")

    def __init__(self, config: MlpConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(config, hidden_size, layer_context)
        self.fused_activation = config.activation
        self.feeds = self.down_proj.method.fed_by(self.up_proj.method)


class UngatedMLP(DenseMLP):
    """down(activation(up(x))). The activation is torch's, in float32."""

    def __init__(self, config: UngatedMlpConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(config, hidden_size, layer_context)
        self._activation = config.activation
        self.act_fn = XIELU(layer_context.at("act_fn")) if config.activation == "xielu" else None

    def derive_weights(self, o_proj: RowParallelLinear, norms: SublayerNorms) -> None:
        if self.act_fn is not None:
            self.act_fn.derive_weights()

    def activated(self, up: torch.Tensor) -> torch.Tensor:
        return activate(up, self._activation) if self.act_fn is None else self.act_fn(up)


class XIELU(WeightedLayer):
    """xIELU (Huang and Schlag, 2024: Deriving Activation Functions Using Integration): a parabola above 0, the integral
    of ELU below, each with a learned factor."""

    def __init__(self, layer_context: LayerContext) -> None:
        super().__init__()
        self._path = layer_context.path
        self.alpha_p, self.alpha_n, self.beta, self.eps = (
            layer_context.parameter(1, dtype=torch.float32) for _ in range(4)
        )
        self._above, self._below = torch.empty(0), torch.empty(0)

    def derive_weights(self) -> None:
        """To be called when all weights are loaded."""
        self._above, self._below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape -> the same."""
        x32 = x.float()
        below = self._below * (torch.expm1(torch.minimum(x32, self.eps)) - x32)
        return (torch.where(x32 > 0, self._above * x32.square(), below) + self.beta * x32).to(x.dtype)

    def weight_parts(self) -> list[WeightPart]:
        return [
            WeightPart(name=f"{self._path}.{name}", shape=(1,), target=parameter)
            for name, parameter in self.named_parameters()
        ]
