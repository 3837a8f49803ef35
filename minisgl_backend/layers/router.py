"""Router of a mixture of experts: which experts a token takes, and their weights."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe.contract import ExpertChoice
from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart


class Router(WeightedLayer):
    """Replicated on all ranks, so that they pick the same experts."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._config = config.router
        self._kernels = layer_context.methods.kernels.mixtures
        self._choice = ExpertChoice(
            experts_per_token=config.experts_per_token,
            scores=self._config.scores,
            renormalize=self._config.renormalize,
            num_groups=self._config.num_groups,
            groups_per_token=self._config.groups_per_token,
            scaling=self._config.scaling,
            by_logits=self._config.on_input,
        )
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
        """Whether `apply_routed` of the experts can do the routing: softmax, with no correction bias or float32."""
        config = self._config
        return self._is_simple and not (config.in_float32 or config.correction_bias)

    @property
    def _is_simple(self) -> bool:
        """Whether the weights are a softmax over all experts, or over the best."""
        config = self._config
        return config.scores == "softmax" and config.num_groups == 1 and config.scaling == 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden_size] -> ids int64 and weights float32, both [num_tokens, experts_per_token]."""
        choice, logits = self._choice, self.method.apply_weights(x.to(self.method.weight.dtype))
        if self._is_simple and self.correction_bias is None:
            return self._kernels.route(logits, choice.experts_per_token, choice.renormalize)
        return self._kernels.choose_experts(logits, choice, self.correction_bias)

    def weight_parts(self) -> list[WeightPart]:
        if self.correction_bias is None:
            return []
        shape = tuple(self.correction_bias.shape)
        return [WeightPart(name=self._correction_name, shape=shape, target=self.correction_bias)]
