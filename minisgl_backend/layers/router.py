"""Router of a mixture of experts: which experts a token takes, and their weights."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe.call import Picked
from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart


class Router(WeightedLayer):
    """Replicated on all ranks, so that they pick the same experts."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._config, self._experts_per_token = config.router, config.experts_per_token
        self._kernels = layer_context.methods.kernels.mixtures
        self._correction_name = layer_context.name("e_score_correction_bias")
        num_experts, corrected = config.num_experts, self._config.correction_bias
        output = LinearOutput(name=layer_context.path, size=num_experts, start=0, local=num_experts)
        self.method = layer_context.methods.plain_linear(
            LinearSpec(outputs=(output,), input_size=hidden_size, local_inputs=hidden_size, bias=self._config.bias),
            dtype=torch.float32 if self._config.in_float32 else None,
        )
        self.correction_bias = layer_context.parameter(config.num_experts, dtype=torch.float32) if corrected else None

    @property
    def is_fused(self) -> bool:
        """Whether a `MixtureCall` can do the routing: softmax, with no correction bias or float32."""
        return self._config.is_softmax and not self._config.in_float32

    def forward(self, x: torch.Tensor) -> Picked:
        """x [num_tokens, hidden_size] -> the experts of each token."""
        config, logits = self._config, self.method.apply_weights(x.to(self.method.weight.dtype))
        if config.is_softmax:
            return self._kernels.route(logits, self._experts_per_token, config.renormalize)
        return self._kernels.choose_experts(logits, config, self._experts_per_token, self.correction_bias)

    def weight_parts(self) -> list[WeightPart]:
        if self.correction_bias is None:
            return []
        shape = tuple(self.correction_bias.shape)
        return [WeightPart(name=self._correction_name, shape=shape, target=self.correction_bias)]
