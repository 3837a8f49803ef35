"""Which experts a token takes, and with what shares."""

from __future__ import annotations

import torch

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart

_BEST_OF_GROUP = 2  # a group's score is the sum of those of so many experts, where there is a correction bias


class Router(WeightedLayer):
    """All ranks compute the same one, so that they pick the same experts."""

    def __init__(self, config: MoeConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._config = config.router
        self._experts_per_token = config.experts_per_token
        self._correction_name = layer_context.name("e_score_correction_bias")
        num_experts, corrected = config.num_experts, self._config.correction_bias
        output = LinearOutput(name=layer_context.path, size=num_experts, start=0, local=num_experts)
        self.method = layer_context.methods.plain_linear(
            LinearSpec(outputs=(output,), input_size=hidden_size, local_inputs=hidden_size, bias=self._config.bias),
            dtype=torch.float32 if self._config.in_float32 else None,
        )
        simple = self._is_simple and not corrected
        self._route = layer_context.methods.kernels.route if simple else None
        self.correction_bias = layer_context.parameter(config.num_experts, dtype=torch.float32) if corrected else None

    @property
    def is_fused(self) -> bool:
        """Whether `apply_routed` of the experts is all of it: shares by softmax over all experts, the best count."""
        config = self._config
        return self._is_simple and not (config.in_float32 or config.correction_bias)

    @property
    def _is_simple(self) -> bool:
        """Whether the shares are those of a softmax over all experts, or over the best."""
        config = self._config
        return config.scores == "softmax" and config.num_groups == 1 and config.scaling == 1.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden_size] -> ids int64 and shares float32, both [num_tokens, experts_per_token]."""
        config = self._config
        logits = self.method.apply_weights(x.to(self.method.weight.dtype))
        if self._route is not None:
            return self._route(logits, self._experts_per_token, config.renormalize)
        logits = logits.float()
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        choice = scores if self.correction_bias is None else scores + self.correction_bias
        if config.on_input:
            choice = logits  # of which the largest have equal scores
        if config.num_groups > 1:
            choice = self._best_groups(choice)
        ids = choice.topk(self._experts_per_token, dim=-1).indices
        shares = scores.gather(-1, ids)
        if config.renormalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return ids, shares * config.scaling

    def _best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Scores [num_tokens, num_experts] with minus infinity for experts of the other groups (DeepSeek-V2, V3)."""
        groups = choice.unflatten(-1, (self._config.num_groups, -1))
        count = 1 if self.correction_bias is None else _BEST_OF_GROUP
        best = groups.topk(count, dim=-1).values.sum(-1).topk(self._config.groups_per_token, dim=-1).indices
        chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, best, True)
        return groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)

    def weight_parts(self) -> list[WeightPart]:
        if self.correction_bias is None:
            return []
        shape = tuple(self.correction_bias.shape)
        return [WeightPart(name=self._correction_name, shape=shape, target=self.correction_bias)]
