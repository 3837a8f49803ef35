"""Experts in FP8, or in other numbers of one byte: their parameters and their multiplication."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8_torch import FP8
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.kernels.moe.fp8_torch import Fp8MixtureKernels
from minisgl_backend.weights.layer import empty_parameter
from minisgl_backend.weights.method import ExpertsMethod, ExpertsSpec


class ScaledExpertsMethod(ExpertsMethod):
    """What experts of one byte a number, with scales, have in common, whoever makes the numbers."""

    def __init__(
        self,
        spec: ExpertsSpec,
        number: torch.dtype,
        mixtures: MixtureKernels,
        device: torch.device,
        blocks: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        """blocks: of gate and up, and of down; see `Fp8MixtureKernels.moe`. None: each output has a scale."""
        super().__init__()
        self.spec, self._mixtures, self._blocks = spec, mixtures, blocks
        experts, local, hidden = spec.num_experts, spec.local, spec.hidden_size
        self.gate_up = empty_parameter(experts, 2 * local, hidden, dtype=number, device=device)
        self.gate_up_scale = empty_scales(experts, (2 * local, hidden), blocks and blocks[0], device)
        self.down = empty_parameter(experts, hidden, local, dtype=number, device=device)
        self.down_scale = empty_scales(experts, (hidden, local), blocks and blocks[1], device)

    def apply_routed(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        *,
        router_bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if norm_weight is not None:
            x = self._mixtures.ops.rms_norm(x, norm_weight, eps)
        spec, logits = self.spec, self._mixtures.plain.linear(x, router, GemmCall(bias=router_bias))
        ids, weights = self._mixtures.route(logits, spec.experts_per_token, spec.renormalize)
        return self.apply_experts(x, ids, weights, residual)


class Fp8ExpertsMethod(ScaledExpertsMethod):
    def __init__(
        self,
        spec: ExpertsSpec,
        kernels: Fp8MixtureKernels,
        mixtures: MixtureKernels,
        device: torch.device,
        blocks: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(spec, FP8, mixtures, device, blocks)
        self._kernels = kernels
        self._x_scales: torch.Tensor | None = None

    def apply_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.moe(
            x, expert_ids, expert_weights, self.gate_up, self.gate_up_scale, self.down, self.down_scale, residual,
            self.spec.activation, self._x_scales, self._blocks,
        )  # fmt: skip


def empty_scales(
    experts: int | None, shape: tuple[int, int], block: tuple[int, int] | None, device: torch.device
) -> torch.nn.Parameter:
    """float32 [(experts,) outputs], or one a block: [(experts,) blocks of outputs, blocks of inputs]."""
    sizes = shape[:1] if block is None else tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    return empty_parameter(*(() if experts is None else (experts,)), *sizes, dtype=torch.float32, device=device)
