"""Experts that a checkpoint has in 4 bits."""

from __future__ import annotations

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec
from minisgl_backend.weights.int4_checkpoint import Axis, Int4Groups, Int4Slice, order_part, read_order
from minisgl_backend.weights.int4_parameters import (
    empty_parameters,
    fill_with_noise,
    is_in_order,
    parts_of_weight,
    weight_of,
)
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.schemes.int4 import Int4Scheme


class Int4ExpertsMethod(ExpertsMethod):
    def __init__(
        self,
        spec: ExpertsSpec,
        scheme: Int4Scheme,
        kernels: ExpertsKernels[Int4Weight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, kernels)
        self._scheme = scheme
        self._hidden = Axis(spec.hidden_size, 0, spec.hidden_size)
        self._inner = Axis(spec.intermediate_size, spec.start, spec.local)
        self._of_gate_up = Int4Groups.of(spec.name, scheme, self._hidden)
        self._of_down = Int4Groups.of(spec.name, scheme, self._inner)
        experts = (spec.num_experts,)
        self.gate_up, self.gate_up_scales, self.gate_up_zeros = empty_parameters(
            experts, 2 * spec.local, spec.hidden_size, scheme, self._of_gate_up, dtype, device
        )
        self.down, self.down_scales, self.down_zeros = empty_parameters(
            experts, spec.hidden_size, spec.local, scheme, self._of_down, dtype, device
        )
        self.multiply_by(
            weight_of(self.gate_up, self.gate_up_scales, self.gate_up_zeros, spec.hidden_size, self._of_gate_up),
            weight_of(self.down, self.down_scales, self.down_zeros, spec.local, self._of_down),
        )
        self.groups_of_inputs: list[torch.Tensor] = []  # of gate, up and down, only to be checked
        if scheme.act_order:
            sizes = [spec.hidden_size, spec.hidden_size, spec.intermediate_size]
            self.groups_of_inputs = [
                torch.empty(spec.num_experts, size, dtype=torch.int32, device=device) for size in sizes
            ]

    def process_weights_after_loading(self) -> None:
        self.groups_of_inputs = []

    def weight_parts(self) -> list[WeightPart]:
        local, parts, slices = self.spec.local, [], []
        for kind, rows in (("gate_proj", slice(0, local)), ("up_proj", slice(local, 2 * local))):
            slices.append(self._slice(kind, self._inner, self._hidden))
            zeros = None if self.gate_up_zeros is None else self.gate_up_zeros[..., rows]
            tensors = self.gate_up[:, rows], self.gate_up_scales[..., rows], zeros
            parts += parts_of_weight(self._scheme, self._of_gate_up, slices[-1], *tensors)
        slices.append(self._slice("down_proj", self._hidden, self._inner))
        tensors = self.down, self.down_scales, self.down_zeros
        parts += parts_of_weight(self._scheme, self._of_down, slices[-1], *tensors)
        for of, target in zip(slices, self.groups_of_inputs, strict=False):
            parts.append(order_part(self._scheme, of, target, self._checked_order))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        fill_with_noise(self.gate_up, self.gate_up_scales, self.gate_up_zeros, generator)
        fill_with_noise(self.down, self.down_scales, self.down_zeros, generator)

    def _checked_order(self, groups: torch.Tensor) -> torch.Tensor:
        """The groups of one expert's inputs."""
        size = (self._of_gate_up if len(groups) == self.spec.hidden_size else self._of_down).stored
        groups = read_order(groups, size, self.spec.name)
        if not is_in_order(groups, size):
            raise ConfigError(
                f"desc_act is true, and {self.spec.name} have their inputs in orders of their own; allowed: false"
            )
        return groups

    def _slice(self, kind: str, outputs: Axis, inputs: Axis) -> Int4Slice:
        return Int4Slice(name=f"{self.spec.name}.{kind}", outputs=outputs, inputs=inputs, experts=self.spec.num_experts)
