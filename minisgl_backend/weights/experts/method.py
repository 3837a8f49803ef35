"""What experts have in common, whatever the number format of their weights: see `weights.method`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.moe.call import EarlyRouter, Experts, MixtureCall
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.weights.layer import WeightedLayer, empty_parameter
from minisgl_backend.weights.parts import WeightPart


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """All experts of a layer: gated MLPs, of which every rank has a slice each."""

    name: str  # this project's, in full: model.layers.0.mlp.experts
    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int  # of one expert, whole
    start: int  # the first of these that this rank has
    local: int  # how many it has
    activation: str  # layers.config.Activation
    bias: bool = False  # of gate, up and down
    adds_bias: bool = True  # of down; False: another rank does, and the ranks' results are summed
    renormalize: bool  # see `MixtureKernels.route`


class ExpertsMethod(WeightedLayer):
    """The weights of all experts of a layer, and how they are multiplied with.

    A format's constructor makes the parameters, and says with `multiply_by` what its kernels make of them.
    """

    operands: Experts[Any]  # see `multiply_by`
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, spec: ExpertsSpec, kernels: ExpertsKernels[Any]) -> None:
        super().__init__()
        self.spec, self.kernels = spec, kernels
        self.gate_up_bias = self.down_bias = None

    def make_biases(self, dtype: torch.dtype, device: torch.device) -> None:
        """Where the experts have them."""
        spec = self.spec
        if spec.bias:
            self.gate_up_bias = empty_parameter(spec.num_experts, 2 * spec.local, dtype=dtype, device=device)
            self.down_bias = empty_parameter(spec.num_experts, spec.hidden_size, dtype=dtype, device=device)

    def multiply_by(self, gate_up: object, down: object) -> None:
        """From now on `apply_weights` computes with these: the weights as the format's kernels take them, which may
        still be filled in place."""
        spec = self.spec
        self.operands = Experts(
            gate_up=gate_up, down=down, gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if spec.adds_bias else None, num_experts=spec.num_experts,
            experts_per_token=spec.experts_per_token, hidden_size=spec.hidden_size, intermediate_size=spec.local,
            renormalize=spec.renormalize, activation=spec.activation,
        )  # fmt: skip

    def process_weights_after_loading(self) -> None:
        """As of `LinearMethod`."""

    def apply_weights(self, x: torch.Tensor, call: MixtureCall) -> torch.Tensor:
        """This rank's part of the mixture: see `MixtureCall`."""
        return self.kernels(x, self.operands, call)

    def early_router(
        self, router: torch.Tensor, norm_weight: torch.Tensor, o_proj: torch.Tensor | Fp8Weight | None
    ) -> EarlyRouter | None:
        """What a call for one token may have in place of its router and the o_proj before, made once; None: these are
        not served. o_proj [hidden_size, inputs]: `LinearMethod.streamed_weight`."""
        if o_proj is None or self.gate_up_bias is not None:
            return None
        return self.kernels.early_router(router, norm_weight, o_proj, self.operands)


def by_kind(gate_up: torch.Tensor, down: torch.Tensor, dim: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """Gate's and up's halves of a dimension, and down, by the names that they have in checkpoints."""
    gate, up = gate_up.chunk(2, dim)
    return iter((("gate_proj", gate), ("up_proj", up), ("down_proj", down)))


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
