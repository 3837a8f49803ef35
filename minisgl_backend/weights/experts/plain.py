"""Experts in the model's own number format."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec, by_kind, experts_bias_part, experts_part
from minisgl_backend.weights.layer import empty_parameter
from minisgl_backend.weights.parts import WeightPart


class PlainExpertsMethod(ExpertsMethod):
    """All experts of a layer are in two weights."""

    def __init__(
        self, spec: ExpertsSpec, kernels: ExpertsKernels[torch.Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, kernels)
        self.gate_up = empty_parameter(spec.num_experts, 2 * spec.local, spec.hidden_size, dtype=dtype, device=device)
        self.down = empty_parameter(spec.num_experts, spec.hidden_size, spec.local, dtype=dtype, device=device)
        self.make_biases(dtype, device)
        self.multiply_by(self.gate_up, self.down)

    def weight_parts(self) -> list[WeightPart]:
        parts = [experts_part(self.spec, kind, target) for kind, target in by_kind(self.gate_up, self.down)]
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = by_kind(self.gate_up_bias, self.down_bias)
            parts += [experts_bias_part(self.spec, kind, target) for kind, target in biases]
        return parts
