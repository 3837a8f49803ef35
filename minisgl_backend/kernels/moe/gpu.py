"""`MixtureKernels` on a GPU."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe import score_router, softmax_router
from minisgl_backend.kernels.moe.call import Picked
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.moe.router_config import RouterConfig
from minisgl_backend.kernels.triton_ops import TritonOps


class TritonMixtureKernels(MixtureKernels):
    """See `MixtureKernels`; routers are kernels, too."""

    ops: TritonOps

    def route(self, logits: torch.Tensor, experts_per_token: int, renormalize: bool) -> Picked:
        return softmax_router.route(logits, experts_per_token, renormalize, self.ops.moe_pdl(logits))

    def choose_experts(
        self,
        logits: torch.Tensor,
        router: RouterConfig,
        experts_per_token: int,
        correction_bias: torch.Tensor | None = None,
    ) -> Picked:
        if logits.shape[1] > score_router.MAX_EXPERTS:
            return super().choose_experts(logits, router, experts_per_token, correction_bias)
        pdl = self.ops.moe_pdl(logits)
        return score_router.choose_experts(logits, router, experts_per_token, correction_bias, pdl)
