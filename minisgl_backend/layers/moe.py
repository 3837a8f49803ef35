"""Mixture of experts: a router picks a few gated MLPs for each token.

With tensor parallelism every rank holds a slice of every expert, so that no tokens travel.
"""

from __future__ import annotations

import torch

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.linear import RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.tensor_parallel import SumWay
from minisgl_backend.weights.parts import WeightPart


class MoeMLP(WeightedLayer):
    """All experts of a layer are in two weights; how checkpoints store them is `weights.names`' concern."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._layer_context = layer_context
        self._intermediate_size = intermediate_size = config.intermediate_size
        self._experts_per_token = config.experts_per_token
        self._norm_topk_prob = config.router.renormalize
        num_experts = config.num_experts
        local = intermediate_size // layer_context.tp.size
        self.router = layer_context.parameter(num_experts, hidden_size)
        self.gate_up = layer_context.parameter(num_experts, 2 * local, hidden_size)
        self.down = layer_context.parameter(num_experts, hidden_size, local)
        self._early: torch.Tensor | None = None

    def derive_weights(self, product: RowParallelLinear, norm: RMSNorm) -> None:
        """To be called when all weights are loaded, with the product and the norm before this."""
        if self._layer_context.tp.size == 1 and product.bias is None:
            self._early = self._layer_context.ops.early_router(self.router, norm.weight, product.weight)

    def takes_product(self, num_tokens: int) -> bool:
        """Whether `forward` is to be given the product before this, of so many tokens, undone."""
        return self._early is not None and num_tokens == 1

    def forward(self, residual: Residual, norm: RMSNorm) -> Residual:
        """hidden + experts(norm(hidden)), both [num_tokens, hidden_size]."""
        tp = self._layer_context.tp
        if residual.product is not None:
            assert self._early is not None, "takes_product says so"
            x, product = residual.product
            return Residual(
                self._layer_context.ops.product_and_mixture(
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
        return self._layer_context.ops.mixture(
            x, self.router, self.gate_up, self.down, self._experts_per_token, self._norm_topk_prob,
            norm_weight=norm_weight, eps=eps, residual=residual,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        num_experts, hidden_size, local = self.down.shape
        context, start = self._layer_context, self._layer_context.tp.rank * local
        up_shape = (num_experts, self._intermediate_size, hidden_size)
        down_shape = (num_experts, hidden_size, self._intermediate_size)
        gate, up = self.gate_up[:, :local], self.gate_up[:, local:]
        return [
            WeightPart(name=context.name("gate.weight"), shape=tuple(self.router.shape), target=self.router),
            *(
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
            ),
        ]
