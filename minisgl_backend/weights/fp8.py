"""The format `fp8`: e4m3 with a scale for each output, made of a checkpoint's weights while they load.

Every tensor is quantized as it is read, so that no more than one of them is there in two formats. An output's scale is
that of all its inputs on every rank, so that numbers do not depend on how many ranks there are: a rank of a
row-parallel layer or of experts reads the inputs of the others, too. Each rank makes the scales of its own activations.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import TORCH_BLOCKS
from minisgl_backend.kernels.linear.fp8_torch import FP8, Fp8Weight, quantize_outputs
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.kernels.moe.fp8_torch import Fp8MixtureKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.weights.dequantized import DequantizedLinearMethod
from minisgl_backend.weights.fp8_checkpoint import Fp8CheckpointExpertsMethod, Fp8CheckpointLinearMethod
from minisgl_backend.weights.fp8_experts import Fp8ExpertsMethod
from minisgl_backend.weights.layer import NOISE, empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import ExpertsSpec, LinearMethod, LinearOutput, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import experts_part, linear_part

log = logging.getLogger(__name__)


class Fp8LinearMethod(LinearMethod):
    def __init__(
        self, spec: LinearSpec, kernels: LinearKernels[Fp8Weight], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec)
        self.weight = empty_parameter(*spec.shape, dtype=FP8, device=device)
        self.weight_scale = empty_parameter(spec.shape[0], dtype=torch.float32, device=device)
        self.make_bias(dtype, device)
        self.multiply_by(kernels, Fp8Weight(self.weight, self.weight_scale))

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        part = linear_part(self.spec, output, self.weight[rows])
        return [_quantized(part, self.weight_scale[rows], self.spec.input_start, self.spec.local_inputs)]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        _fill_with_noise(self.weight.data, self.weight_scale.data, generator)
        fill_bias_with_noise(self.bias, generator)


class Fp8ConvertedExpertsMethod(Fp8ExpertsMethod):
    def weight_parts(self) -> list[WeightPart]:
        spec, local = self.spec, self.spec.local
        return [
            _quantized(experts_part(spec, kind, numbers), scale, spec.start, local)
            for kind, numbers, scale in (
                ("gate_proj", self.gate_up[:, :local], self.gate_up_scale[:, :local]),
                ("up_proj", self.gate_up[:, local:], self.gate_up_scale[:, local:]),
                ("down_proj", self.down, self.down_scale),
            )
        ]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        for numbers, scales in ((self.gate_up, self.gate_up_scale), (self.down, self.down_scale)):
            for expert in range(self.spec.num_experts):
                _fill_with_noise(numbers.data[expert], scales.data[expert], generator)


class Fp8Factory(MethodFactory):
    def __init__(
        self, kernels: DeviceKernels, dtype: torch.dtype, device: torch.device, parameters: Any = None
    ) -> None:
        super().__init__(kernels, dtype, device, parameters)
        self._fp8, self._mixtures = _kernels(kernels, device)
        self._is_weight_only = parameters is not None and parameters.activations is None
        if self._is_weight_only and device.type == "cuda":
            log.warning(
                "the checkpoint has FP8 weights and no format for activations: weights are dequantized in every step, "
                "which is slower than bfloat16; checkpoints with FP8 activations, in 4 bits, or in 16 with "
                "quantization=fp8 are faster"
            )

    def linear(self, spec: LinearSpec) -> LinearMethod:
        if self.parameters is None:
            return Fp8LinearMethod(spec, self._fp8, self.dtype, self.device)
        method = Fp8CheckpointLinearMethod(
            spec, self.parameters, self._fp8, self.kernels.plain, self.dtype, self.device
        )
        if self._is_weight_only and self.device.type == "cpu":
            return DequantizedLinearMethod(method, self.kernels.plain, self.dtype)
        return method

    def experts(self, spec: ExpertsSpec) -> Fp8ExpertsMethod:
        if spec.bias:
            raise ConfigError(f"quantization is 'fp8'; allowed for {spec.name}, which have biases: unset")
        if self.parameters is not None:
            return Fp8CheckpointExpertsMethod(spec, self.parameters, self._mixtures, self.kernels.mixtures, self.device)
        return Fp8ConvertedExpertsMethod(spec, self._mixtures, self.kernels.mixtures, self.device)


def _kernels(kernels: DeviceKernels, device: torch.device) -> tuple[LinearKernels[Fp8Weight], Fp8MixtureKernels]:
    facts = kernels.gemms.facts
    if not kernels.on_gpu:
        return LinearKernels("fp8", kernels.gemms), Fp8MixtureKernels()
    from minisgl_backend.kernels.linear.fp8_libraries import torch_has_blocks
    from minisgl_backend.kernels.moe.fp8_gpu import TritonFp8MixtureKernels
    from minisgl_backend.kernels.triton_ops import TritonOps

    assert isinstance(kernels.ops, TritonOps), "the facts are those of its device"
    if not torch_has_blocks(device):
        facts = replace(facts, libraries=facts.libraries - {TORCH_BLOCKS})
    return LinearKernels("fp8", kernels.gemms, facts), TritonFp8MixtureKernels(kernels.ops)


def _quantized(part: WeightPart, scale: torch.Tensor, first_input: int, inputs: int) -> WeightPart:
    """The part with FP8 numbers and scales. Where inputs are split over ranks, all are read for the scale."""
    splits_inputs = part.dim == len(part.shape) - 1

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = quantize_outputs(values)
        return (numbers[..., first_input : first_input + inputs] if splits_inputs else numbers), scales

    return replace(part, quantize=quantize, scale=scale, whole=splits_inputs)


def _fill_with_noise(weight: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    numbers, scales = quantize_outputs(noise.normal_(0.0, NOISE, generator=generator))
    weight.copy_(numbers)
    scale.copy_(scales)
