"""The format `plain`: weights in the model's own number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import PlainKernels
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.weights.layer import empty_parameter
from minisgl_backend.weights.method import (
    ExpertsMethod,
    ExpertsSpec,
    LinearMethod,
    LinearOutput,
    LinearSpec,
    MethodFactory,
)
from minisgl_backend.weights.parts import WeightPart


class PlainLinearMethod(LinearMethod):
    def __init__(
        self,
        spec: LinearSpec,
        kernels: PlainKernels,
        dtype: torch.dtype,
        device: torch.device,
        shared: torch.Tensor | None = None,
    ) -> None:
        """shared: a weight [outputs, inputs] that another layer owns and loads (tied embeddings)."""
        super().__init__(spec)
        if shared is None:
            self.weight = empty_parameter(*spec.shape, dtype=dtype, device=device)
        else:
            self.__dict__["weight"] = shared  # a plain attribute, and no parameter of its own
        self._is_shared = shared is not None
        self.make_bias(dtype, device)
        self.multiply_by(kernels, self.weight)  # parameters are filled in place

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._kernels.linear(x, self.operand, GemmCall(out=out))
        if self._added_bias is not None:
            out += self._added_bias

    def dequantized(self) -> torch.Tensor:
        return self.weight

    def prepare(self, alike: Sequence[LinearMethod], rows: Sequence[int], longest: int = 0) -> None:
        # A GEMM with a bias stays with torch, which adds it on the way.
        if weights := [one.operand for one in alike if one.bias is None]:
            self._kernels.prepare(weights, rows, longest)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        return [] if self._is_shared else [linear_part(self.spec, output, self.weight[rows])]


class PlainFactory(MethodFactory):
    def linear(self, spec: LinearSpec) -> PlainLinearMethod:
        return PlainLinearMethod(spec, self.kernels.plain, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> PlainExpertsMethod:
        return PlainExpertsMethod(spec, self.kernels.mixtures, self.dtype, self.device)


def linear_part(spec: LinearSpec, output: LinearOutput, target: torch.Tensor) -> WeightPart:
    """The weight of one of the outputs. The axis that is split over ranks is that of which this rank has a part."""
    part = output.part("weight", (output.size, spec.input_size), target)
    if spec.local_inputs == spec.input_size:
        return part
    return replace(part, dim=1, start=spec.input_start)


class PlainExpertsMethod(ExpertsMethod):
    """All experts of a layer are in two weights."""

    def __init__(self, spec: ExpertsSpec, kernels: MixtureKernels, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self._kernels = spec, kernels
        self.gate_up = empty_parameter(spec.num_experts, 2 * spec.local, spec.hidden_size, dtype=dtype, device=device)
        self.down = empty_parameter(spec.num_experts, spec.hidden_size, spec.local, dtype=dtype, device=device)
        self.gate_up_bias: torch.Tensor | None = None
        self.down_bias: torch.Tensor | None = None
        self._biases: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if spec.bias:
            self.gate_up_bias = empty_parameter(spec.num_experts, 2 * spec.local, dtype=dtype, device=device)
            self.down_bias = empty_parameter(spec.num_experts, spec.hidden_size, dtype=dtype, device=device)
            self._biases = (self.gate_up_bias, self.down_bias if spec.adds_bias else None)  # filled in place

    def apply_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.moe(
            x, expert_ids, expert_weights, self.gate_up, self.down, residual, self.spec.activation, self._biases
        )

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
        spec = self.spec
        return self._kernels.mixture(
            x, router, self.gate_up, self.down, spec.experts_per_token, spec.renormalize, norm_weight=norm_weight,
            eps=eps, residual=residual, activation=spec.activation, router_bias=router_bias, biases=self._biases,
        )  # fmt: skip

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: LinearMethod
    ) -> torch.Tensor | None:
        if not isinstance(o_proj, PlainLinearMethod) or o_proj.bias is not None or self._biases is not None:
            return None
        return self._kernels.early_router(router, norm_weight, o_proj.weight)

    def apply_with_o_proj(
        self,
        x: torch.Tensor,
        o_proj: LinearMethod,
        residual: torch.Tensor,
        early: torch.Tensor,
        *,
        norm_weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        assert isinstance(o_proj, PlainLinearMethod), "early_router looks"
        spec = self.spec
        return self._kernels.o_proj_and_mixture(
            x, o_proj.weight, residual, early, self.gate_up, self.down, spec.experts_per_token, spec.renormalize,
            norm_weight=norm_weight, eps=eps, activation=spec.activation,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        gate, up = self.gate_up[:, : self.spec.local], self.gate_up[:, self.spec.local :]
        parts = [
            experts_part(self.spec, kind, target)
            for kind, target in (("gate_proj", gate), ("up_proj", up), ("down_proj", self.down))
        ]
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias[:, : self.spec.local], self.gate_up_bias[:, self.spec.local :]
            parts += [
                experts_bias_part(self.spec, kind, target)
                for kind, target in (("gate_proj", gate), ("up_proj", up), ("down_proj", self.down_bias))
            ]
        return parts


def experts_part(spec: ExpertsSpec, kind: str, target: torch.Tensor) -> WeightPart:
    """One of gate_proj, up_proj and down_proj of all experts."""
    is_down = kind == "down_proj"
    outer, inner = (spec.hidden_size, spec.intermediate_size)[:: 1 if is_down else -1]
    return WeightPart(
        name=f"{spec.name}.{kind}.weight",
        shape=(spec.num_experts, outer, inner),
        target=target,
        dim=2 if is_down else 1,
        start=spec.start,
        experts=True,
    )


def experts_bias_part(spec: ExpertsSpec, kind: str, target: torch.Tensor) -> WeightPart:
    """As `experts_part`, of the biases. That of down_proj is whole on every rank."""
    is_down = kind == "down_proj"
    return WeightPart(
        name=f"{spec.name}.{kind}.bias",
        shape=(spec.num_experts, spec.hidden_size if is_down else spec.intermediate_size),
        target=target,
        dim=1,
        start=0 if is_down else spec.start,
        experts=True,
    )
