"""What a mixture of experts is called with, whatever its weights' format: the experts, a value made once when their
weights are there, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight, dequantize

Weight = TypeVar("Weight")  # of all experts of a layer; what it is depends on the format


class Picked(NamedTuple):
    """The experts of each token, best first; both [num_tokens, experts_per_token]."""

    ids: torch.Tensor  # int64
    weights: torch.Tensor  # float32


class EarlyRouter(NamedTuple):
    """An o_proj that a mixture runs itself, with a router beside it: see early_router.py."""

    o_proj: torch.Tensor | Fp8Weight  # [hidden_size, inputs]
    weight: torch.Tensor  # [num_experts, inputs + hidden_size]

    @classmethod
    def of(cls, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: torch.Tensor | Fp8Weight) -> EarlyRouter:
        """router [num_experts, hidden_size], norm_weight [hidden_size], o_proj [hidden_size, inputs]."""
        outer = (
            o_proj.float()
            if isinstance(o_proj, torch.Tensor)
            else dequantize(o_proj.numbers, o_proj.scale, o_proj.block)
        )
        normed = router.float() * norm_weight.float()
        return cls(o_proj, torch.cat([normed @ outer, normed], 1).to(router.dtype))


class MixtureCall(NamedTuple):
    """The weighted sum of the experts of each token of norm(x), plus the residual: x [num_tokens, hidden_size] -> the
    same shape. Experts are those picked, or else those that a softmax of the router's logits picks.

    With an early router x [1, inputs of o_proj] is one token's, whose o_proj is added to the residual before all else.
    """

    picked: Picked | None = None
    router: torch.Tensor | None = None  # [num_experts, hidden_size]
    router_bias: torch.Tensor | None = None  # [num_experts]
    norm_weight: torch.Tensor | None = None  # [hidden_size]: RMSNorm of x with `eps` first; where there is a router
    eps: float = 0.0
    residual: torch.Tensor | None = None  # [num_tokens, hidden_size], added to the result
    early: EarlyRouter | None = None


@dataclass(frozen=True, kw_only=True)
class Experts(Generic[Weight]):
    """All experts of a layer, of which this rank has a slice each. An expert is down @ (activation(gate) * up)."""

    gate_up: Weight  # [num_experts, 2 * intermediate_size, hidden_size], gate rows first
    down: Weight  # [num_experts, hidden_size, intermediate_size]
    gate_up_bias: torch.Tensor | None = None  # [num_experts, 2 * intermediate_size]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden_size]; None: there is none, or another rank adds it
    num_experts: int
    hidden_size: int
    intermediate_size: int  # of one expert, of this rank
    experts_per_token: int = 0  # that a router picks
    renormalize: bool = True  # the weights of the experts that a softmax picks add up to 1
    activation: str = "silu"  # layers.config.Activation

    @property
    def aligned(self) -> bool:
        """Whether plain weights are aligned to 16 bytes."""
        weights = (self.gate_up, self.down)
        return all(not isinstance(one, torch.Tensor) or one.data_ptr() % 16 == 0 for one in weights)

    @property
    def blocks(self) -> frozenset[tuple[int, int]]:
        return blocks_of(self.gate_up, self.down)


def blocks_of(*weights: object) -> frozenset[tuple[int, int]]:
    """Outputs and inputs that share a scale, of those weights that are FP8 in blocks."""
    return frozenset(one.block for one in weights if isinstance(one, Fp8Weight) and one.block is not None)
