"""How a mixture picks experts, as data: needs neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BEST_OF_GROUP = 2  # with a correction bias, a group's score is the sum of its best 2 experts' scores


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a mixture picks experts: those with the best scores, by softmax or sigmoid over all logits."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the weights of the picked experts add up to 1
    bias: bool = False  # of the logits (gpt-oss)
    correction_bias: bool = False  # added to the scores for the selection only (DeepSeek-V3)
    num_groups: int = 1  # experts are picked from the best `groups_per_token` of these groups (DeepSeek-V2)
    groups_per_token: int = 1
    scaling: float = 1.0  # factor of all weights
    in_float32: bool = False  # its weight and GEMM are float32, whatever the model's dtype is
    on_input: bool = False  # a token's weight multiplies the input of its one expert, not the output (Llama 4)

    @property
    def is_softmax(self) -> bool:
        """Whether the weights are a softmax over all experts, or over the best, and no more."""
        return self.scores == "softmax" and self.num_groups == 1 and self.scaling == 1.0 and not self.correction_bias

    @property
    def by_logits(self) -> bool:
        """Whether the largest logits are picked, which differ where scores may round to equal values."""
        return self.on_input
