"""Weights that a checkpoint has in FP8, with a scale for each tensor, each output, or each block.

A scale of a tensor becomes one of each of its outputs, so that tensors with several are multiplied together. Blocks
that a rank's slice or the next of several tensors cuts are cut into smaller ones, all with the scale of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight, dequantize
from minisgl_backend.kernels.linear.kernels import LinearKernels, PlainKernels
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import linear_part
from minisgl_backend.weights.scales import Cut, block_part, empty_scales, fill_fp8_with_noise, least_block, scale_part
from minisgl_backend.weights.schemes.fp8 import Fp8Scheme


class _WeightOnly:
    """Weights become plain numbers in every GEMM: activations have no format."""

    def __init__(self, plain: PlainKernels, dtype: torch.dtype) -> None:
        self._plain, self._dtype = plain, dtype

    def linear(self, x: torch.Tensor, weight: Fp8Weight, call: GemmCall = BARE) -> torch.Tensor:
        numbers = dequantize(weight.numbers, weight.scale, weight.block)
        return self._plain.linear(x, numbers.to(self._dtype), call)

    direct = linear

    def prepare(self, weights: Sequence[Fp8Weight], rows: Sequence[int], longest: int = 0) -> None:
        """The numbers are made in every step."""


class Fp8CheckpointLinearMethod(LinearMethod):
    def __init__(
        self,
        spec: LinearSpec,
        scheme: Fp8Scheme,
        kernels: LinearKernels[Fp8Weight],
        plain: PlainKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec)
        self._scheme = scheme
        self.block = _linear_block(spec, scheme.block) if scheme.block is not None else None
        self.weight = empty_parameter(*spec.shape, dtype=FP8, device=device)
        self.weight_scale = empty_scales(None, spec.shape, self.block, device)
        self.make_bias(dtype, device)
        self.input_scale: torch.Tensor | None = None
        self._x_scale: torch.Tensor | None = None
        if scheme.activations == "static":
            self.input_scale = empty_parameter(len(spec.outputs), dtype=torch.float32, device=device)
            self._x_scale = torch.ones((), device=device)
        operand = Fp8Weight(self.weight, self.weight_scale, self._x_scale, self.block)
        self.multiply_by(_WeightOnly(plain, dtype) if scheme.activations is None else kernels, operand)

    def process_weights_after_loading(self) -> None:
        if (
            self.input_scale is not None and self._x_scale is not None
        ):  # tensors that are multiplied together have the same input
            self._x_scale.copy_(self.input_scale.max())

    def prepare(self, alike: Sequence[LinearMethod], rows: Sequence[int], longest: int = 0) -> None:
        super().prepare([one for one in alike if one.operand.block == self.block], rows, longest)

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs] of this rank, float32."""
        return dequantize(self.weight, self.weight_scale, self.block)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        parts = [
            replace(linear_part(self.spec, output, self.weight[rows]), dtypes=(FP8,)),
            self._scale_part(output, rows.start),
        ]
        if self.input_scale is not None:
            target = self.input_scale[index : index + 1]
            parts.append(WeightPart(name=f"{output.name}.input_scale", shape=(), target=target, output_axis=None))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        fill_fp8_with_noise(self.weight, self.weight_scale, generator)
        fill_bias_with_noise(self.bias, generator)
        if self.input_scale is not None:
            self.input_scale.data.fill_(1.0)

    def _scale_part(self, output: LinearOutput, row: int) -> WeightPart:
        spec, scheme = self.spec, self._scheme
        name, rows = f"{output.name}.{scheme.scale}", slice(row, row + output.local)
        if scheme.block is None or self.block is None:
            return scale_part(name, self.weight_scale[rows], scheme, (output.size,), output.start, output.row_order)
        small = self.block[0]
        target = self.weight_scale[row // small : -(-(row + output.local) // small)]
        outputs = Cut.of(output.size, output.start, output.local, scheme.block[0], small)
        inputs = Cut.of(spec.input_size, spec.input_start, spec.local_inputs, scheme.block[1], self.block[1])
        splits_inputs = spec.local_inputs < spec.input_size
        order = output.row_order if output.row_order is not None and small == 1 else None
        return block_part(name, (), target, outputs, inputs, 1 if splits_inputs else 0, order)


def _linear_block(spec: LinearSpec, block: tuple[int, int]) -> tuple[int, int]:
    """The largest blocks that fit into a rank's slice of each tensor."""
    borders = [output.start for output in spec.outputs] + [output.local for output in spec.outputs[:-1]]
    outputs = math.gcd(block[0], *borders)
    if any(output.row_order is not None and outputs % len(output.row_order) for output in spec.outputs):
        outputs = 1  # whose order is another one then
    inputs = block[1]
    if spec.local_inputs < spec.input_size:
        inputs = least_block(spec.outputs[0].name, inputs, spec.local_inputs)
    return outputs, inputs
