"""Mixture of experts: a router picks a few gated MLPs for each token.

With tensor parallelism every rank holds a slice of every expert, so that no tokens travel.
"""

from __future__ import annotations

import torch

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.linear import RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer, WeightPart
from minisgl_backend.tensor_parallel import SumWay


class MoeMLP(WeightedLayer):
    """Checkpoint names are those of Qwen3-MoE: mlp.gate and mlp.experts.N.{gate,up,down}_proj."""

    def __init__(self, config: MoeConfig, hidden_size: int, name: str, placement: LayerContext) -> None:
        super().__init__()
        self._placement = placement
        self._name = name
        self._intermediate_size = intermediate_size = config.intermediate_size
        self._experts_per_token = config.experts_per_token
        self._norm_topk_prob = config.router.renormalize
        num_experts = config.num_experts
        local = intermediate_size // placement.tp.size
        self.router = placement.parameter(num_experts, hidden_size)
        self.gate_up = placement.parameter(num_experts, 2 * local, hidden_size)
        self.down = placement.parameter(num_experts, hidden_size, local)
        self._early: torch.Tensor | None = None

    def derive_weights(self, product: RowParallelLinear, norm: RMSNorm) -> None:
        """To be called when all weights are loaded, with the product and the norm before this."""
        if self._placement.tp.size == 1 and product.bias is None:
            self._early = self._placement.ops.early_router(self.router, norm.weight, product.weight)

    def takes_product(self, num_tokens: int) -> bool:
        """Whether `forward` is to be given the product before this, of so many tokens, undone."""
        return self._early is not None and num_tokens == 1

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        """hidden + experts(norm(hidden)), both [num_tokens, hidden_size]."""
        tp = self._placement.tp
        if residual.product is not None:
            assert self._early is not None, "takes_product says so"
            x, product = residual.product
            return Residual(
                self._placement.ops.product_and_mixture(
                    x, product, residual.hidden, self._early, self.gate_up, self.down, self._experts_per_token,
                    self._norm_topk_prob, norm_weight=norm.weight, eps=norm.eps,
                )
            )  # fmt: skip
        if tp.size == 1:
            hidden = residual.hidden
            return Residual(self._experts(hidden, norm_weight=norm.weight, eps=norm.eps, residual=hidden))
        hidden, x = norm.settle(residual)
        # All ranks compute the same router, so they pick the same experts.
        if residual.way is not SumWay.IN_PLACE:
            partial = self._experts(x)
            return Residual(hidden, partial, tp.send_ahead(partial, residual.way))
        # The hidden states must enter the sum once.
        out = self._experts(x, residual=hidden if tp.rank == 0 else None)
        return Residual(out, arrival=tp.begin_all_reduce(out))

    def _experts(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same; the keywords are those of `Ops.mixture`."""
        return self._placement.ops.mixture(
            x, self.router, self.gate_up, self.down, self._experts_per_token, self._norm_topk_prob,
            norm_weight=norm_weight, eps=eps, residual=residual,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        num_experts, hidden_size, local = self.down.shape
        start = self._placement.tp.rank * local
        up_shape = (self._intermediate_size, hidden_size)
        parts = [WeightPart(name=f"{self._name}.gate.weight", shape=tuple(self.router.shape), target=self.router)]
        for expert in range(num_experts):
            name = f"{self._name}.experts.{expert}"
            gate, up = self.gate_up[expert, :local], self.gate_up[expert, local:]
            parts += [
                WeightPart(name=f"{name}.gate_proj.weight", shape=up_shape, target=gate, start=start),
                WeightPart(name=f"{name}.up_proj.weight", shape=up_shape, target=up, start=start),
                WeightPart(
                    name=f"{name}.down_proj.weight",
                    shape=(hidden_size, self._intermediate_size),
                    target=self.down[expert],
                    dim=1,
                    start=start,
                ),
            ]
        return parts
