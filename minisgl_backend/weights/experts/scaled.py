"""Experts of one byte a number, with scales: in FP8, made of a checkpoint's weights while they load or as it has them,
and in INT8."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight, dequantize
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked
from minisgl_backend.kernels.moe.choose import FP8_WEIGHTS_ALONE, ExpertsKey
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels, MixtureKernels
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec, by_kind, experts_part
from minisgl_backend.weights.layer import empty_parameter
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.scales import (
    Block,
    Cut,
    OutputScales,
    block_part,
    empty_scales,
    fill_fp8_with_noise,
    fill_int8_with_noise,
    least_block,
    quantize_and_fill_with_noise,
    quantized,
    scale_part,
)
from minisgl_backend.weights.schemes.fp8 import Fp8Scheme


class ScaledExpertsMethod(ExpertsMethod):
    """What they have in common, whoever makes the numbers."""

    def __init__(
        self,
        spec: ExpertsSpec,
        kernels: ExpertsKernels[Any],
        number: torch.dtype,
        device: torch.device,
        blocks: tuple[Block | None, Block | None] = (None, None),
    ) -> None:
        """blocks: of gate and up, and of down; None: each output has a scale."""
        super().__init__(spec, kernels)
        experts, local, hidden = spec.num_experts, spec.local, spec.hidden_size
        self.gate_up = empty_parameter(experts, 2 * local, hidden, dtype=number, device=device)
        self.gate_up_scale = empty_scales(experts, (2 * local, hidden), blocks[0], device)
        self.down = empty_parameter(experts, hidden, local, dtype=number, device=device)
        self.down_scale = empty_scales(experts, (hidden, local), blocks[1], device)

    def scaled_parts(self) -> list[tuple[str, WeightPart, torch.Tensor]]:
        """Of gate_proj, up_proj and down_proj: name, numbers and scales."""
        numbers, scales = by_kind(self.gate_up, self.down), by_kind(self.gate_up_scale, self.down_scale)
        return [
            (kind, experts_part(self.spec, kind, target), scale)
            for (kind, target), (_, scale) in zip(numbers, scales, strict=True)
        ]


class Fp8ConvertedExpertsMethod(ScaledExpertsMethod):
    """Made while they load."""

    def __init__(self, spec: ExpertsSpec, kernels: ExpertsKernels[Fp8Weight], device: torch.device) -> None:
        super().__init__(spec, kernels, FP8, device)
        self.multiply_by(Fp8Weight(self.gate_up, self.gate_up_scale), Fp8Weight(self.down, self.down_scale))

    def weight_parts(self) -> list[WeightPart]:
        return [quantized(part, scale, self.spec.start, self.spec.local) for _, part, scale in self.scaled_parts()]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        for numbers, scales in ((self.gate_up, self.gate_up_scale), (self.down, self.down_scale)):
            for expert in range(self.spec.num_experts):
                quantize_and_fill_with_noise(numbers.data[expert], scales.data[expert], generator)


class Fp8CheckpointExpertsMethod(ScaledExpertsMethod):
    """As a checkpoint has them, with a scale for each tensor, each output, or each block."""

    def __init__(
        self, spec: ExpertsSpec, scheme: Fp8Scheme, kernels: ExpertsKernels[Fp8Weight], device: torch.device
    ) -> None:
        static = scheme.activations == "static"
        blocks = _local_blocks(spec, scheme.block)
        super().__init__(spec, kernels, FP8, device, blocks)
        self._scheme, self._blocks = scheme, blocks
        self._x_scales = torch.ones(2, device=device) if static else None  # before gate and up, and before down
        before, between = (None, None) if self._x_scales is None else self._x_scales.unbind()
        self.multiply_by(
            Fp8Weight(self.gate_up, self.gate_up_scale, before, blocks[0]),
            Fp8Weight(self.down, self.down_scale, between, blocks[1]),
        )
        self.input_scale: torch.Tensor | None = None
        if static:
            self.input_scale = empty_parameter(3, spec.num_experts, dtype=torch.float32, device=device)

    def process_weights_after_loading(self) -> None:
        if self.input_scale is not None and self._x_scales is not None:
            gate, up, down = self.input_scale.amax(1)
            self._x_scales.copy_(torch.stack((torch.maximum(gate, up), down)))

    def weight_parts(self) -> list[WeightPart]:
        spec, parts = self.spec, []
        for index, (kind, part, scale) in enumerate(self.scaled_parts()):
            parts += [replace(part, dtypes=(FP8,)), self._scale_part(kind, scale)]
            if self.input_scale is not None:
                parts.append(
                    WeightPart(
                        name=f"{spec.name}.{kind}.input_scale", shape=(spec.num_experts,),
                        target=self.input_scale[index], experts=True, output_axis=None,
                    )
                )  # fmt: skip
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        for numbers, scales in ((self.gate_up, self.gate_up_scale), (self.down, self.down_scale)):
            for expert in range(self.spec.num_experts):
                fill_fp8_with_noise(numbers[expert], scales[expert], generator)
        if self.input_scale is not None:
            self.input_scale.data.fill_(1.0)

    def _scale_part(self, kind: str, target: torch.Tensor) -> WeightPart:
        spec, scheme, is_down = self.spec, self._scheme, kind == "down_proj"
        name, inner, hidden = (
            f"{spec.name}.{kind}.{scheme.scale}",
            (spec.intermediate_size, spec.start, spec.local),
            (spec.hidden_size, 0, spec.hidden_size),
        )
        outer, inputs = (hidden, inner) if is_down else (inner, hidden)
        block = self._blocks[1 if is_down else 0]
        if scheme.block is None or block is None:
            return scale_part(name, target, scheme, (spec.num_experts, outer[0]), outer[1], None)
        cuts = Cut.of(*outer, scheme.block[0], block[0]), Cut.of(*inputs, scheme.block[1], block[1])
        return block_part(name, (spec.num_experts,), target, *cuts, 2 if is_down else 1, None)


def _local_blocks(spec: ExpertsSpec, block: Block | None) -> tuple[Block | None, Block | None]:
    """Of gate and up, and of down, that fit into a rank's slices."""
    if block is None:
        return None, None
    outputs, inputs = block
    whole = spec.local == spec.intermediate_size
    return (
        (math.gcd(outputs, spec.local), inputs),  # up's begin where those of gate end
        (outputs, inputs if whole else least_block(spec.name, inputs, spec.local)),
    )


class WeightOnlyKernels(ExpertsKernels[Fp8Weight]):
    """Activations have no format: for more than a few tokens, weights become plain numbers in every call."""

    def __init__(self, kernels: MixtureKernels) -> None:
        super().__init__(FP8_WEIGHTS_ALONE, kernels)
        self._plain: ExpertsKernels[torch.Tensor] = ExpertsKernels(PLAIN, kernels)

    def __call__(self, x: torch.Tensor, experts: Experts[Any], call: MixtureCall) -> torch.Tensor:
        """Of the experts that were picked; of all of them on GPUs, where the host does not know which."""
        if self.chooser.kernel(ExpertsKey.of(x, experts, call)) != "torch":
            return super().__call__(x, experts, call)
        x, (ids, weights) = self.kernels.picked(x, experts, call)
        chosen: torch.Tensor | slice = slice(None)
        if not x.is_cuda:
            chosen, ids = ids.unique(return_inverse=True)

        def plain(weight: Fp8Weight) -> torch.Tensor:
            # Numbers of one byte: index_select has no FP8 on a CPU.
            numbers = weight.numbers.view(torch.uint8)[chosen].view(FP8)
            return dequantize(numbers, weight.scale[chosen], weight.block).to(x.dtype)

        gate_up, down = plain(experts.gate_up), plain(experts.down)
        dequantized = replace(experts, gate_up=gate_up, down=down, num_experts=len(down))
        return self._plain(x, dequantized, MixtureCall(Picked(ids, weights), residual=call.residual))


class Int8ExpertsMethod(ScaledExpertsMethod):
    def __init__(
        self, spec: ExpertsSpec, scheme: OutputScales, kernels: ExpertsKernels[Int8Weight], device: torch.device
    ) -> None:
        super().__init__(spec, kernels, torch.int8, device)
        self._scheme = scheme
        self.multiply_by(Int8Weight(self.gate_up, self.gate_up_scale), Int8Weight(self.down, self.down_scale))

    def weight_parts(self) -> list[WeightPart]:
        spec, parts = self.spec, []
        for kind, part, scale in self.scaled_parts():
            size, start = (spec.hidden_size, 0) if kind == "down_proj" else (spec.intermediate_size, spec.start)
            shape = (spec.num_experts, size)
            parts.append(replace(part, dtypes=(torch.int8,)))
            parts.append(scale_part(f"{spec.name}.{kind}.weight_scale", scale, self._scheme, shape, start, None))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        fill_int8_with_noise(self.gate_up, self.gate_up_scale, generator)
        fill_int8_with_noise(self.down, self.down_scale, generator)
