"""RMSNorm weights. The norm itself is an argument of the product that follows it (`Ops.linear`) or `Ops.rms_norm`."""

from __future__ import annotations

import torch

from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class RMSNorm(WeightedLayer):
    """Root mean square norm (Zhang and Sennrich, 2019), the same on every rank."""

    def __init__(self, size: int, eps: float, name: str, placement: LayerContext) -> None:
        super().__init__()
        self._placement = placement
        self._name = placement.name(name)
        self.eps = eps
        self.weight = placement.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, size] -> same shape."""
        return self._placement.ops.rms_norm(x, self.weight, self.eps)

    def settle(self, residual: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states with all that is still to be added, and their norm: [num_tokens, size] each."""
        assert residual.product is None, "it is left to those who take it"
        if residual.arrival is not None:
            residual.arrival()
        if residual.partial is None:
            return residual.hidden, self(residual.hidden)
        return self._placement.tp.sum_norm(residual.partial, residual.hidden, self.weight, self.eps, residual.sent)

    def weight_parts(self) -> list[WeightPart]:
        return [WeightPart(name=f"{self._name}.weight", shape=tuple(self.weight.shape), target=self.weight)]
