"""The format `plain`: weights in the model's own number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.kernels import PlainKernels
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.experts.plain import PlainExpertsMethod
from minisgl_backend.weights.layer import empty_parameter
from minisgl_backend.weights.method import (
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
        self.kernels.linear(x, self.operand, GemmCall(out=out))
        if self.added_bias is not None:
            out += self.added_bias

    def dequantized(self) -> torch.Tensor:
        return self.weight

    def prepare(self, alike: Sequence[LinearMethod], rows: Sequence[int], longest: int = 0) -> None:
        # A GEMM with a bias stays with torch, which adds it on the way.
        if weights := [one.operand for one in alike if one.bias is None]:
            self.kernels.prepare(weights, rows, longest)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        return [] if self._is_shared else [linear_part(self.spec, output, self.weight[rows])]


class PlainFactory(MethodFactory):
    weight_format = PLAIN

    def linear(self, spec: LinearSpec) -> PlainLinearMethod:
        return PlainLinearMethod(spec, self.kernels.plain, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> PlainExpertsMethod:
        return PlainExpertsMethod(spec, self.mixtures, self.dtype, self.device)


def linear_part(spec: LinearSpec, output: LinearOutput, target: torch.Tensor) -> WeightPart:
    """The weight of one of the outputs. The axis that is split over ranks is that of which this rank has a part."""
    part = output.part("weight", (output.size, spec.input_size), target)
    if spec.local_inputs == spec.input_size:
        return part
    return replace(part, dim=1, start=spec.input_start)
