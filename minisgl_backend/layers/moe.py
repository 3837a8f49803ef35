"""Mixture of experts: a router picks a few gated MLPs for each token.

With tensor parallelism every rank holds a slice of every expert, so that no tokens travel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm, SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.router import Router
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class TokenGate(WeightedLayer):
    """One number from 0 to 1 for each token."""

    def __init__(self, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._name = layer_context.name("weight")
        self.weight = layer_context.parameter(1, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, 1]."""
        return torch.sigmoid(F.linear(x, self.weight))

    def weight_parts(self) -> list[WeightPart]:
        return [WeightPart(name=self._name, shape=tuple(self.weight.shape), target=self.weight)]


class SharedExpert(nn.Module):
    """The gated MLP that every token takes besides its experts, multiplied by a gate of its own (Qwen2-MoE) or not."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._layer_context, size = layer_context, config.shared_intermediate_size
        self._activation = config.activation
        inner = layer_context.at("shared_expert")
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, outputs, False, inner)
        self.down_proj = RowParallelLinear(size, hidden_size, "down_proj", False, inner)
        self.gate = TokenGate(hidden_size, layer_context.at("shared_expert_gate")) if config.shared_gate else None

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual [num_tokens, hidden_size] -> residual + this rank's part of the MLP."""
        linear = self._layer_context.ops.linear
        gated = linear(x, self.gate_up_proj.weight, activation=self._activation)
        if self.gate is None:
            return linear(gated, self.down_proj.weight, residual=residual)
        out = linear(gated, self.down_proj.weight) * self.gate(x)
        return out if residual is None else out + residual


class MoeMLP(WeightedLayer):
    """All experts of a layer are in two weights; how checkpoints store them is `weights.names`' concern."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._layer_context = layer_context
        self._config = config
        local = config.intermediate_size // layer_context.tp.size
        self.router = Router(config, hidden_size, layer_context.at("gate"))
        self.gate_up = layer_context.parameter(config.num_experts, 2 * local, hidden_size)
        self.down = layer_context.parameter(config.num_experts, hidden_size, local)
        self.shared_expert = (
            SharedExpert(config, hidden_size, layer_context) if config.shared_intermediate_size else None
        )
        self._is_fused = self.router.is_fused and self.shared_expert is None
        self._early: torch.Tensor | None = None

    def derive_weights(self, o_proj: RowParallelLinear, norms: SublayerNorms) -> None:
        """To be called when all weights are loaded, with the o_proj before this and its own norms."""
        plain = self._layer_context.tp.size == 1 and o_proj.bias is None and norms.adds_as_is
        if self._is_fused and plain and isinstance(norms.before, RMSNorm):
            self._early = self._layer_context.ops.early_router(self.router.weight, norms.before.weight, o_proj.weight)

    def takes_o_proj(self, num_tokens: int) -> bool:
        """Whether this MLP runs the preceding o_proj itself (deferred), at this token count."""
        return self._early is not None and num_tokens == 1

    def forward(self, residual: Residual, norms: SublayerNorms) -> Residual:
        """The residual stream plus experts(norm(residual)), [num_tokens, hidden_size]."""
        norm, config = norms.before, self._config
        if (deferred := residual.deferred_o_proj) is not None:
            assert self._early is not None, "takes_o_proj says so"
            assert norm is not None, "derive_weights looks"
            hidden, x, o_proj = deferred
            return residual.become(
                self._layer_context.ops.o_proj_and_mixture(
                    x, o_proj, hidden, self._early, self.gate_up, self.down, config.experts_per_token,
                    config.router.renormalize, norm_weight=norm.weight, eps=norm.eps, activation=config.activation,
                )
            )  # fmt: skip
        if self._layer_context.tp.size == 1 and self._is_fused:
            residual, x, norm = residual.before_gemm(norm)
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return residual.plus(
                lambda added_to: self._mixture(x, norm_weight=weight, eps=eps, residual=added_to), norms
            )
        residual, x = residual.settled(norm)
        return residual.plus(lambda added_to: self.part(x, added_to), norms)

    def part(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual [num_tokens, hidden_size] -> residual + this rank's part of all experts that a token takes."""
        if self.shared_expert is not None:
            residual = self.shared_expert(x, residual)
        if self.router.is_fused:
            return self._mixture(x, residual=residual)
        ids, shares = self.router(x)
        return self._layer_context.ops.moe(x, ids, shares, self.gate_up, self.down, residual, self._config.activation)

    def _mixture(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same; the keywords are those of `Ops.mixture`."""
        return self._layer_context.ops.mixture(
            x, self.router.weight, self.gate_up, self.down, self._config.experts_per_token,
            self._config.router.renormalize, norm_weight=norm_weight, eps=eps, residual=residual,
            activation=self._config.activation,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        num_experts, hidden_size, local = self.down.shape
        context, start = self._layer_context, self._layer_context.tp.rank * local
        size = self._config.intermediate_size
        up_shape, down_shape = (num_experts, size, hidden_size), (num_experts, hidden_size, size)
        gate, up = self.gate_up[:, :local], self.gate_up[:, local:]
        return [
            WeightPart(
                name=context.name(f"experts.{name}.weight"),
                shape=shape,
                target=target,
                dim=dim,
                start=start,
                experts=True,
            )
            for name, shape, target, dim in (
                ("gate_proj", up_shape, gate, 1),
                ("up_proj", up_shape, up, 1),
                ("down_proj", down_shape, self.down, 2),
            )
        ]
