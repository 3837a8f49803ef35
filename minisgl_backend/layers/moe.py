"""Mixture of experts: a router picks a few gated MLPs for each token.

With tensor parallelism every rank holds a slice of every expert, so that no tokens are exchanged.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_backend.kernels.moe.call import EarlyRouter, MixtureCall, Picked
from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm, SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.router import Router
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.experts.method import ExpertsSpec
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
    """The gated MLP that every token takes in addition to its experts; optionally with its own gate (Qwen2-MoE)."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        size = config.shared_intermediate_size
        self._activation = config.activation
        inner = layer_context.at("shared_expert")
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = ColumnParallelLinear(hidden_size, outputs, False, inner)
        self.down_proj = RowParallelLinear(size, hidden_size, "down_proj", False, inner)
        self.gate = TokenGate(hidden_size, layer_context.at("shared_expert_gate")) if config.shared_gate else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x, residual [num_tokens, hidden_size] -> residual + this rank's part of the MLP. slots: of adapters."""
        gated = self.gate_up_proj.of(x, activation=self._activation, slots=slots)
        if self.gate is None:
            return self.down_proj.part(gated, residual, slots)
        out = self.down_proj.part(gated, None, slots) * self.gate(x)
        return out if residual is None else out + residual


class MoeMLP(nn.Module):
    """A mixture of experts; `weights.names` knows how checkpoints store them."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._tp = tp = layer_context.tp
        local = config.intermediate_size // tp.size
        self.router = Router(config, hidden_size, layer_context.at("gate"))
        self.experts = layer_context.methods.experts(
            ExpertsSpec(
                name=layer_context.name("experts"),
                num_experts=config.num_experts,
                experts_per_token=config.experts_per_token,
                hidden_size=hidden_size,
                intermediate_size=config.intermediate_size,
                start=tp.rank * local,
                local=local,
                activation=config.activation,
                bias=config.bias,
                adds_bias=tp.rank == 0,
                renormalize=config.router.renormalize,
            )
        )
        self.shared_expert = (
            SharedExpert(config, hidden_size, layer_context) if config.shared_intermediate_size else None
        )
        self._scales_input = config.router.on_input
        self._routes = self.router.is_fused  # whether the experts' method includes the router
        # Whether it also includes the norm before them: with a shared expert both would norm, which gains nothing.
        self._norms = self._routes and self.shared_expert is None
        self._early: EarlyRouter | None = None

    def derive_weights(self, o_proj: RowParallelLinear, norms: SublayerNorms) -> None:
        """Called when all weights are loaded, with the preceding o_proj and this MLP's norms."""
        router = self.router.method
        fits = self._norms and self._tp.size == 1 and router.bias is None
        if fits and norms.adds_as_is and isinstance(norms.before, RMSNorm):
            self._early = self.experts.early_router(router.weight, norms.before.weight, o_proj.method.streamed_weight)

    def takes_o_proj(self, num_tokens: int) -> bool:
        """Whether this MLP runs the preceding o_proj itself (deferred), at this token count."""
        return self._early is not None and num_tokens == 1

    def forward(self, residual: Residual, norms: SublayerNorms) -> Residual:
        """The residual stream plus experts(norm(residual)), [num_tokens, hidden_size]."""
        norm = norms.before
        if (deferred := residual.deferred_o_proj) is not None:
            assert isinstance(norm, RMSNorm), "derive_weights looks"
            hidden, x, _ = deferred
            call = MixtureCall(norm_weight=norm.weight, eps=norm.eps, residual=hidden, early=self._early)
            return residual.become(self.experts.apply_weights(x, call))
        if self._tp.size == 1 and self._norms:
            residual, x, unapplied = residual.before_gemm(norm)
            return residual.plus(lambda added_to: self.part(x, added_to, norm=unapplied), norms)
        residual, x = residual.settled(norm)
        return residual.plus(lambda added_to: self.part(x, added_to, residual.by_row), norms)

    def part(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        slots: torch.Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> torch.Tensor:
        """x, residual [num_tokens, hidden_size] -> residual + this rank's partial sum of each token's experts.

        slots: of adapters, which only the shared expert has. norm: applied to x, which may be the residual, first.
        """
        if self._routes:
            router, (weight, eps) = self.router.method, (None, 0.0) if norm is None else (norm.weight, norm.eps)
            call = MixtureCall(None, router.weight, router.bias, weight, eps, residual)
            out = self.experts.apply_weights(x, call)
        else:
            scaled, picked = x, self.router(x)
            if self._scales_input:
                scaled, picked = x * picked.weights.to(x.dtype), Picked(picked.ids, torch.ones_like(picked.weights))
            out = self.experts.apply_weights(scaled, MixtureCall(picked, residual=residual))
        return out if self.shared_expert is None else self.shared_expert(x, out, slots)
