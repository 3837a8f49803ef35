"""The format `int8`: weights that a checkpoint has in 8-bit integers, activations quantized for each token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear import int8 as kernels
from minisgl_backend.kernels.ops import Ops
from minisgl_backend.weights.fp8_checkpoint import scale_part
from minisgl_backend.weights.layer import NOISE, empty_parameter
from minisgl_backend.weights.method import ExpertsMethod, ExpertsSpec, LinearMethod, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import bias_part, linear_part
from minisgl_backend.weights.schemes.int8 import Int8Scheme


class Int8LinearMethod(LinearMethod):
    def __init__(
        self, spec: LinearSpec, scheme: Int8Scheme, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.spec, self._scheme = spec, scheme
        outputs, inputs = spec.shape
        self.weight = empty_parameter(outputs, inputs, dtype=torch.int8, device=device)
        self.weight_scale = empty_parameter(outputs, dtype=torch.float32, device=device)
        self.bias = empty_parameter(outputs, dtype=dtype, device=device) if spec.bias else None
        bias = self.bias if spec.adds_bias else None
        self.apply_weights = partial(kernels.linear, ops, weight=self.weight, scale=self.weight_scale, bias=bias)

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self.apply_weights(x))

    def weight_parts(self) -> list[WeightPart]:
        spec, parts, row = self.spec, [], 0
        for output in spec.outputs:
            rows = slice(row, row + output.local)
            row += output.local
            parts.append(replace(linear_part(spec, output.name, self.weight[rows]), dtypes=(torch.int8,)))
            name, shape = f"{output.name}.weight_scale", (output.size,)
            parts.append(scale_part(name, self.weight_scale[rows], self._scheme, shape, output.start, output.row_order))
            if self.bias is not None:
                parts.append(bias_part(spec, output.name, self.bias[rows]))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        self.weight.data.random_(-127, 128, generator=generator)
        self.weight_scale.data.fill_(NOISE / 73)  # their standard deviation
        if self.bias is not None:
            self.bias.data.fill_(1.0)


class Int8Factory(MethodFactory):
    def linear(self, spec: LinearSpec) -> Int8LinearMethod:
        return Int8LinearMethod(spec, self.parameters, self.plain.ops, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        raise ConfigError(f"the checkpoint has {spec.name} in INT8; allowed for experts: FP8, 4 bits, or plain weights")
