"""The format `int8`: weights that a checkpoint has in 8-bit integers, activations quantized for each token."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.experts.scaled import Int8ExpertsMethod
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import linear_part
from minisgl_backend.weights.scales import fill_int8_with_noise, scale_part
from minisgl_backend.weights.schemes.int8 import Int8Scheme

EXPERTS_CAPABILITY = (8, 0)  # from which Triton compiles the experts' kernels


class Int8LinearMethod(LinearMethod):
    def __init__(
        self,
        spec: LinearSpec,
        scheme: Int8Scheme,
        kernels: LinearKernels[Int8Weight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec)
        self._scheme = scheme
        self.weight = empty_parameter(*spec.shape, dtype=torch.int8, device=device)
        self.weight_scale = empty_parameter(spec.shape[0], dtype=torch.float32, device=device)
        self.make_bias(dtype, device)
        self.multiply_by(kernels, Int8Weight(self.weight, self.weight_scale))

    def dequantized(self) -> torch.Tensor:
        """[outputs, inputs] of this rank, float32."""
        return self.weight.float() * self.weight_scale.unsqueeze(1)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        name = f"{output.name}.weight_scale"
        return [
            replace(linear_part(self.spec, output, self.weight[rows]), dtypes=(torch.int8,)),
            scale_part(name, self.weight_scale[rows], self._scheme, (output.size,), output.start, output.row_order),
        ]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        fill_int8_with_noise(self.weight, self.weight_scale, generator)
        fill_bias_with_noise(self.bias, generator)


class Int8Factory(MethodFactory):
    weight_format = "int8"

    def linear(self, spec: LinearSpec) -> Int8LinearMethod:
        return Int8LinearMethod(spec, self.parameters, self.gemms, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> Int8ExpertsMethod:
        if spec.bias:
            raise ConfigError(f"{spec.name} have biases; allowed with INT8 weights: experts without")
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < EXPERTS_CAPABILITY:
            raise ConfigError(
                f"the checkpoint has {spec.name} in INT8; allowed for experts on this GPU, whose compute capability is "
                f"below {EXPERTS_CAPABILITY[0]}.{EXPERTS_CAPABILITY[1]}: plain weights"
            )
        return Int8ExpertsMethod(spec, self.parameters, self.mixtures, self.device)
