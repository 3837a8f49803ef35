"""Routers of mixtures of experts, and mixtures with weights of one format, on tensors of one device."""

from __future__ import annotations

from typing import Generic

import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.kernels import PlainKernels
from minisgl_backend.kernels.moe.call import EarlyRouter, Experts, MixtureCall, Picked, Weight, blocks_of
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.kernels.moe.router_config import BEST_OF_GROUP, RouterConfig


class MixtureKernels:
    """Routers by torch. Chosen once for a device; all mixtures on it hold it.

    Statistics are computed in float32 whatever the format of the tensors is. No method synchronises with the device.
    """

    def __init__(self, plain: PlainKernels) -> None:
        """plain: of the same device; computes the routers' GEMMs."""
        self.plain, self.ops = plain, plain.ops
        self.facts = plain.device.facts  # by which the experts' kernels are chosen

    def route(self, logits: torch.Tensor, experts_per_token: int, renormalize: bool) -> Picked:
        """The experts with the largest shares of the softmax over all: logits [num_tokens, num_experts]. `renormalize`
        makes them add up to 1."""
        weights, ids = logits.float().softmax(dim=-1).topk(experts_per_token, dim=-1)
        if renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Picked(ids, weights)

    def choose_experts(
        self, logits: torch.Tensor, router: RouterConfig, k: int, correction_bias: torch.Tensor | None = None
    ) -> Picked:
        """The general form of `route`, for k experts of each token: correction_bias float32 [num_experts] is added to
        the scores for the selection only; only experts of the best groups are selected (DeepSeek-V2, V3)."""
        logits = logits.float()
        scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
        value = logits if router.by_logits else scores
        if correction_bias is not None:
            value = value + correction_bias
        if router.num_groups > 1:
            count = 1 if correction_bias is None else BEST_OF_GROUP
            value = _of_best_groups(value, router.num_groups, router.groups_per_token, count)
        ids = value.topk(k, dim=-1).indices
        shares = scores.gather(-1, ids)
        if router.renormalize:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return Picked(ids, shares * router.scaling)

    def picked(self, x: torch.Tensor, experts: Experts[Weight], call: MixtureCall) -> tuple[torch.Tensor, Picked]:
        """norm(x), and its experts, by kernels of their own: what a kernel begins with that does not include the
        router."""
        if call.picked is not None:
            return x, call.picked
        assert call.router is not None, "a call has picked experts, or a router"
        if call.norm_weight is not None:
            x = self.ops.rms_norm(x, call.norm_weight, call.eps)
        logits = self.plain.linear(x, call.router, GemmCall(bias=call.router_bias))
        return x, self.route(logits, experts.experts_per_token, experts.renormalize)


def _of_best_groups(value: torch.Tensor, num_groups: int, groups_per_token: int, count: int) -> torch.Tensor:
    """value [num_tokens, num_experts] with -inf for all experts outside the best groups; a group's score is the sum of
    its `count` best experts."""
    groups = value.unflatten(-1, (num_groups, -1))
    best = groups.topk(count, dim=-1).values.sum(-1).topk(groups_per_token, dim=-1).indices
    chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=value.device).scatter_(-1, best, True)
    return groups.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)


class ExpertsKernels(Generic[Weight]):
    """Mixtures of experts with weights of one format: what the rows of choose.py name is run.

    Only rows named torch wait for the device, as reference.py says.
    """

    def __init__(self, weight_format: str, kernels: MixtureKernels, facts: DeviceFacts | None = None) -> None:
        """facts: None: the device's."""
        self.kernels = kernels
        self.chooser = experts_chooser(weight_format, facts or kernels.facts)

    def __call__(self, x: torch.Tensor, experts: Experts[Weight], call: MixtureCall) -> torch.Tensor:
        """See `MixtureCall`."""
        mixture = self.chooser.run(ExpertsKey.of(x, experts, call))
        out: torch.Tensor = mixture(self.kernels, x, experts, call)
        return out

    def early_router(
        self,
        router: torch.Tensor,
        norm_weight: torch.Tensor,
        o_proj: torch.Tensor | Fp8Weight,
        experts: Experts[Weight],
    ) -> EarlyRouter | None:
        """What a call with these weights has for one token, made once when they are loaded; None: no kernel serves it.

        router [num_experts, hidden], norm_weight [hidden], o_proj [hidden, inputs].
        """
        (num_experts, hidden), size_in = router.shape, o_proj.shape[1]
        key = ExpertsKey(
            1, num_experts, 1, hidden, 1, router.dtype, routed=True, o_proj_inputs=size_in,
            blocks=experts.blocks | blocks_of(o_proj),
        )  # fmt: skip
        is_served = self.chooser.kernel(key) == "early_router"
        return EarlyRouter.of(router, norm_weight, o_proj) if is_served else None
