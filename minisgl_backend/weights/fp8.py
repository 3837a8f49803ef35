"""The format `fp8`: e4m3 with a scale for each output, made of a checkpoint's weights while they load.

Every tensor is quantized as it is read, so that no more than one of them is there in two formats. An output's scale is
that of all its inputs on every rank, so that numbers do not depend on how many ranks there are: a rank of a
row-parallel layer or of experts reads the inputs of the others, too. Each rank makes the scales of its own activations.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import SGL_EXPERTS, TORCH_BLOCKS
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.weights.dequantized import DequantizedLinearMethod
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.experts.scaled import (
    Fp8CheckpointExpertsMethod,
    Fp8ConvertedExpertsMethod,
    WeightOnlyKernels,
)
from minisgl_backend.weights.fp8_checkpoint import Fp8CheckpointLinearMethod
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.plain import linear_part
from minisgl_backend.weights.scales import quantize_and_fill_with_noise, quantized

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
        return [quantized(part, self.weight_scale[rows], self.spec.input_start, self.spec.local_inputs)]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        quantize_and_fill_with_noise(self.weight.data, self.weight_scale.data, generator)
        fill_bias_with_noise(self.bias, generator)


class Fp8Factory(MethodFactory):
    weight_format = "fp8"

    def __init__(
        self, kernels: DeviceKernels, dtype: torch.dtype, device: torch.device, parameters: Any = None
    ) -> None:
        super().__init__(kernels, dtype, device, parameters)
        self._is_weight_only = parameters is not None and parameters.activations is None
        if self._is_weight_only and device.type == "cuda":
            log.warning(
                "the checkpoint has FP8 weights and no format for activations: weights are dequantized in every step, "
                "which is slower than bfloat16; checkpoints with FP8 activations, in 4 bits, or in 16 with "
                "quantization=fp8 are faster"
            )

    @cached_property
    def gemms(self) -> LinearKernels[Any]:
        gemms = self.kernels.gemms
        facts = gemms.facts
        if self.kernels.on_gpu:
            from minisgl_backend.kernels.linear.fp8.libraries import torch_has_blocks

            if not torch_has_blocks(self.device):
                facts = replace(facts, libraries=facts.libraries - {TORCH_BLOCKS})
        return LinearKernels(self.weight_format, gemms, facts)

    @cached_property
    def mixtures(self) -> ExpertsKernels[Any]:
        mixtures, facts = self.kernels.mixtures, self.kernels.mixtures.facts
        if self.kernels.on_gpu:
            from minisgl_backend.kernels.moe.fp8_library import has_grouped_gemm

            if not has_grouped_gemm(self.device):
                facts = replace(facts, libraries=facts.libraries - {SGL_EXPERTS})
        return ExpertsKernels(self.weight_format, mixtures, facts)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        if self.parameters is None:
            return Fp8LinearMethod(spec, self.gemms, self.dtype, self.device)
        method = Fp8CheckpointLinearMethod(
            spec, self.parameters, self.gemms, self.kernels.plain, self.dtype, self.device
        )
        if self._is_weight_only and self.device.type == "cpu":
            return DequantizedLinearMethod(method, self.kernels.plain, self.dtype)
        return method

    def experts(self, spec: ExpertsSpec) -> Fp8ConvertedExpertsMethod | Fp8CheckpointExpertsMethod:
        if spec.bias:
            raise ConfigError(f"quantization is 'fp8'; allowed for {spec.name}, which have biases: unset")
        if self.parameters is None:
            return Fp8ConvertedExpertsMethod(spec, self.mixtures, self.device)
        kernels = WeightOnlyKernels(self.kernels.mixtures) if self._is_weight_only else self.mixtures
        return Fp8CheckpointExpertsMethod(spec, self.parameters, kernels, self.device)
