"""`MixtureKernels` on a GPU: moe/choose.py says which kernel a mixture takes."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.linear.kernels import PlainKernels
from minisgl_backend.kernels.moe import early_router, few_tokens, grouped, grouped_tma, one_token, score_router
from minisgl_backend.kernels.moe.choose import ExpertsKey, experts_chooser
from minisgl_backend.kernels.moe.contract import ExpertChoice
from minisgl_backend.kernels.moe.reference import TorchMixtureKernels
from minisgl_backend.kernels.triton_ops import TritonOps


class TritonMixtureKernels(TorchMixtureKernels):
    """See `MixtureKernels`."""

    plain: PlainKernels
    ops: TritonOps

    def __init__(self, plain: PlainKernels) -> None:
        super().__init__(plain)
        self._experts_kernel = experts_chooser(PLAIN, plain.device.facts).kernel

    def route(
        self, logits: torch.Tensor, experts_per_token: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return grouped.route(logits, experts_per_token, renormalize, self.ops.moe_pdl(logits))

    def choose_experts(
        self, logits: torch.Tensor, choice: ExpertChoice, correction_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.shape[1] > score_router.MAX_EXPERTS:
            return super().choose_experts(logits, choice, correction_bias)
        return score_router.choose_experts(logits, choice, correction_bias, self.ops.moe_pdl(logits))

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
        (tokens, k), (num_experts, hidden, size) = expert_ids.shape, down.shape
        aligned = gate_up.data_ptr() % 16 == 0 and down.data_ptr() % 16 == 0
        kernel = self._experts_kernel(
            ExpertsKey(
                tokens, num_experts, k, hidden, size, x.dtype, bias=biases is not None, activation=activation,
                unit_stride=x.stride(1) == 1, aligned=aligned,
            )
        )  # fmt: skip
        arguments = (x, expert_ids, expert_weights, gate_up, down, residual, activation)
        if kernel == "grouped_tma":
            return grouped_tma.moe(*arguments, biases=biases)
        return grouped.moe(*arguments, pdl=self.ops.moe_pdl(x), biases=biases)

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
        (tokens, hidden), (num_experts, _, size) = x.shape, down.shape
        kernel = self._experts_kernel(
            ExpertsKey(
                tokens, num_experts, experts_per_token, hidden, size, x.dtype, routed=True, bias=biases is not None,
                activation=activation, unit_stride=x.stride(1) == 1,
            )
        )  # fmt: skip
        if kernel == "one_token":
            return one_token.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
                residual=residual, activation=activation, router_bias=router_bias, biases=biases, pdl=self.ops.pdl(x),
            )  # fmt: skip
        if kernel == "few_tokens":
            return few_tokens.mixture(
                x, router, gate_up, down, experts_per_token, renormalize, self.plain.workspace, norm_weight=norm_weight,
                eps=eps, residual=residual, activation=activation, router_bias=router_bias, biases=biases,
                pdl=self.ops.pdl(x),
            )  # fmt: skip
        return super().mixture(
            x, router, gate_up, down, experts_per_token, renormalize, norm_weight=norm_weight, eps=eps,
            residual=residual, activation=activation, router_bias=router_bias, biases=biases,
        )  # fmt: skip

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: torch.Tensor
    ) -> torch.Tensor | None:
        (num_experts, hidden), size_in = router.shape, o_proj.shape[1]
        key = ExpertsKey(1, num_experts, 1, hidden, 1, router.dtype, routed=True, o_proj_inputs=size_in)
        if self._experts_kernel(key) != "early_router":
            return None
        return early_router.early_router(router, norm_weight, o_proj)

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
        pdl = self.ops.pdl(x)
        hidden, logits = early_router.output_and_logits(x, o_proj, residual, early, experts_per_token, pdl=pdl)
        return one_token.experts(
            hidden, logits, gate_up, down, renormalize, divided=False, norm_weight=norm_weight, eps=eps,
            residual=hidden, activation=activation, pdl=pdl,
        )  # fmt: skip
