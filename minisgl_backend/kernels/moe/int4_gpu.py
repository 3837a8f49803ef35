"""`Int4MixtureKernels` on a GPU: which kernel serves how many tokens."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.int4_torch import Int4Weight
from minisgl_backend.kernels.moe import int4
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.int4_torch import Int4MixtureKernels


class TritonInt4MixtureKernels(Int4MixtureKernels):
    """See `Int4MixtureKernels`. Nothing synchronises with the device."""

    def __init__(self, mixtures: TritonMixtureKernels) -> None:
        super().__init__(mixtures)
        self._plain, self._ops = mixtures.plain, mixtures.ops
        self._experts_kernel = experts_chooser("int4", mixtures.ops.facts).kernel

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: Int4Weight,
        down: Int4Weight,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        pdl = self._ops.moe_pdl(x)
        return int4.moe(x, expert_ids, expert_weights, gate_up, down, residual, activation, pdl=pdl)

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Int4Weight,
        down: Int4Weight,
        experts_per_token: int,
        renormalize: bool,
        *,
        router_bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor:
        key = ExpertsKey(
            len(x), len(router), experts_per_token, down.size_out, down.size_in, x.dtype, routed=True,
            activation=activation, unit_stride=x.stride(1) == 1,
        )  # fmt: skip
        if self._experts_kernel(key) != "few_tokens":
            return super().mixture(
                x, router, gate_up, down, experts_per_token, renormalize, router_bias=router_bias,
                norm_weight=norm_weight, eps=eps, residual=residual, activation=activation,
            )  # fmt: skip
        return int4.mixture(
            x, router, gate_up, down, experts_per_token, renormalize, self._plain.workspace, router_bias=router_bias,
            norm_weight=norm_weight, eps=eps, residual=residual, activation=activation, pdl=self._ops.pdl(x),
        )  # fmt: skip
