"""Mixtures of experts with weights in the model's own number format.

`MixtureKernels` is the contract; `reference.TorchMixtureKernels` serves it on every device and is the reference that
other implementations are tested against.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import PlainKernels

BEST_OF_GROUP = 2  # with a correction bias, a group's score is the sum of its best 2 experts' scores


@dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """How a router chooses experts from logits: as in `layers.config.RouterConfig`."""

    experts_per_token: int
    scores: str = "softmax"  # or sigmoid
    renormalize: bool = True
    num_groups: int = 1
    groups_per_token: int = 1
    scaling: float = 1.0
    by_logits: bool = False  # the largest logits are chosen, which differ where scores may round to equal values


class MixtureKernels(ABC):
    """Routers and experts on tensors of one device. Chosen once; experts of the format `plain` hold it.

    Statistics and activations are computed in float32 whatever the format of the tensors is.
    No method synchronises with the device, except `moe` and `mixture` where their docstrings say so.
    """

    def __init__(self, plain: PlainKernels) -> None:
        """plain: of the same device; computes the routers' GEMMs."""
        self.plain, self.ops = plain, plain.ops

    @abstractmethod
    def route(
        self, logits: torch.Tensor, experts_per_token: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, best first: logits [num_tokens, num_experts] -> (ids, weights).

        ids int64 and weights float32, both [num_tokens, experts_per_token]: the largest shares of the softmax over
        all experts; `renormalize` makes them add up to 1.
        """

    @abstractmethod
    def choose_experts(
        self, logits: torch.Tensor, choice: ExpertChoice, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The general form of `route`: `choice` gives the scores; correction_bias float32 [num_experts] is added to
        them for the selection only; only experts of the best groups are selected (DeepSeek-V2, V3)."""

    @abstractmethod
    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, plus `residual` where given: x [num_tokens, hidden] -> same shape.

        expert_ids int64 and expert_weights [num_tokens, experts_per_token]; gate_up [num_experts, 2 * size, hidden]
        with gate rows first; down [num_experts, hidden, size]. An expert is down @ (activation(gate) * up).
        biases: of gate_up [num_experts, 2 * size], and of down [num_experts, hidden] (None: not added here).
        Implementations that need the number of tokens of each expert on the host synchronise and say so.
        """

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        router_bias: torch.Tensor | None = None,
        biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """`linear` with the router, `route` and `moe`, of norm(x): x [num_tokens, hidden] -> same shape.

        router [num_experts, hidden], router_bias [num_experts]. norm_weight [hidden]: RMSNorm of x with `eps` first.
        residual [num_tokens, hidden] is added to the result. biases: as of `moe`. Synchronises where `moe` does.
        """
        if norm_weight is not None:
            x = self.ops.rms_norm(x, norm_weight, eps)
        logits = self.plain.linear(x, router, GemmCall(bias=router_bias))
        expert_ids, weights = self.route(logits, experts_per_token, renormalize)
        return self.moe(x, expert_ids, weights, gate_up, down, residual, activation, biases)

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: torch.Tensor
    ) -> torch.Tensor | None:
        """Prepares weights for `o_proj_and_mixture`, called once; None: it does not serve them.

        router [num_experts, hidden], norm_weight [hidden], o_proj [hidden, size_in].
        """
        return None

    def o_proj_and_mixture(
        self,
        x: torch.Tensor,
        o_proj: torch.Tensor,
        residual: torch.Tensor,
        early: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor,
        eps: float,
        activation: str = "silu",
    ) -> torch.Tensor:
        """One token's `linear` with o_proj [hidden, size_in] and the residual, then `mixture` with norm and residual.

        x [1, size_in], residual [1, hidden] -> [1, hidden]. early: `early_router` of these weights.
        """
        raise NotImplementedError
