"""Experts in MXFP4 on GPUs with bfloat16: which kernel serves how many tokens."""

from __future__ import annotations

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.moe import mxfp4, mxfp4_one_token
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.mxfp4_torch import Biases, Mxfp4Kernels, Weight


class TritonMxfp4Kernels(Mxfp4Kernels):
    """See `Mxfp4Kernels`. Only `pack` synchronises with the device."""

    mixtures: TritonMixtureKernels

    def __init__(self, mixtures: TritonMixtureKernels) -> None:
        super().__init__(mixtures)
        self._kernel = experts_chooser("mxfp4", mixtures.ops.facts).kernel

    def pack(self, blocks: torch.Tensor, scales: torch.Tensor) -> Weight:
        """Raises ConfigError for scales above 2 or NaN, which the kernels cannot represent."""
        if int(scales.max()) > mxfp4.LARGEST_SCALE:
            raise ConfigError(
                f"a scale of the MXFP4 weights is 2^{int(scales.max()) - 127}; allowed on a GPU: at most "
                f"2^{mxfp4.LARGEST_SCALE - 127}"
            )
        return mxfp4.pack(blocks, scales)

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        biases: Biases | None = None,
    ) -> torch.Tensor:
        return mxfp4.moe(
            x, expert_ids, expert_weights, gate_up, down, residual, activation, biases, pdl=self.mixtures.ops.moe_pdl(x)
        )

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        experts_per_token: int,
        renormalize: bool,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        router_bias: torch.Tensor | None = None,
        biases: Biases | None = None,
    ) -> torch.Tensor:
        (tokens, hidden), (num_experts, _, quarter) = x.shape, down[0].shape
        kernel = self._kernel(
            ExpertsKey(
                tokens, num_experts, experts_per_token, hidden, 4 * quarter, x.dtype, routed=True,
                bias=biases is not None, activation=activation, unit_stride=x.stride(1) == 1,
            )
        )  # fmt: skip
        if kernel == "one_token":
            return mxfp4_one_token.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
                residual=residual, activation=activation, router_bias=router_bias, biases=biases,
                pdl=self.mixtures.ops.pdl(x),
            )  # fmt: skip
        if kernel == "few_tokens":
            return mxfp4.mixture_of_few(
                x, router, gate_up, down, experts_per_token, renormalize, self.mixtures.plain.workspace,
                norm_weight=norm_weight, eps=eps, residual=residual, activation=activation, router_bias=router_bias,
                biases=biases, pdl=self.mixtures.ops.pdl(x),
            )  # fmt: skip
        return super().mixture(
            x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
            residual=residual, activation=activation, router_bias=router_bias, biases=biases,
        )  # fmt: skip
