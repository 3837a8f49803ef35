"""The head of a sequence-classification model: a hidden state to one score per label."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class ClassificationHead(WeightedLayer):
    """Replicated on every rank: it is small."""

    def __init__(self, num_labels: int, hidden_size: int, name: str, layer_context: LayerContext) -> None:
        super().__init__()
        self._name = layer_context.name(name)
        self.weight = layer_context.parameter(num_labels, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, num_labels], in the model's dtype."""
        return F.linear(hidden, self.weight)

    def weight_parts(self) -> list[WeightPart]:
        return [WeightPart(name=f"{self._name}.weight", shape=tuple(self.weight.shape), target=self.weight)]
