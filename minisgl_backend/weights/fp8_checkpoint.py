"""Weights that a checkpoint has in FP8, with a scale for each tensor, each output, or each block.

A scale of a tensor becomes one of each of its outputs, so that tensors with several are multiplied together. Blocks
that a rank's slice or the next of several tensors cuts are cut into smaller ones, all with the scale of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.fp8_torch import FP8, LARGEST, Fp8Weight, dequantize
from minisgl_backend.kernels.linear.kernels import LinearKernels, PlainKernels
from minisgl_backend.kernels.moe.contract import MixtureKernels
from minisgl_backend.kernels.moe.fp8_torch import Fp8MixtureKernels
from minisgl_backend.weights.fp8_experts import Fp8ExpertsMethod, empty_scales
from minisgl_backend.weights.layer import NOISE, empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import ExpertsSpec, LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import PLAIN_DTYPES, WeightPart
from minisgl_backend.weights.plain import experts_part, linear_part
from minisgl_backend.weights.schemes.fp8 import Fp8Scheme

_SCALE_DTYPES = (*PLAIN_DTYPES, torch.float8_e8m0fnu)
_LEAST_INPUTS = 32  # of a block: what the matrix units multiply at once
_NUMBERS = 100.0  # standard deviation of random FP8 numbers, of which the largest is 448


class _WeightOnly:
    """Weights become plain numbers in every GEMM: activations have no format."""

    def __init__(self, plain: PlainKernels, dtype: torch.dtype) -> None:
        self._plain, self._dtype = plain, dtype

    def linear(self, x: torch.Tensor, weight: Fp8Weight, call: GemmCall = BARE) -> torch.Tensor:
        numbers = dequantize(weight.numbers, weight.scale, weight.block)
        return self._plain.linear(x, numbers.to(self._dtype), call)

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
        _fill_with_noise(self.weight, self.weight_scale, generator)
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
        outputs = _Cut.of(output.size, output.start, output.local, scheme.block[0], small)
        inputs = _Cut.of(spec.input_size, spec.input_start, spec.local_inputs, scheme.block[1], self.block[1])
        splits_inputs = spec.local_inputs < spec.input_size
        order = output.row_order if output.row_order is not None and small == 1 else None
        return _block_part(name, (), target, outputs, inputs, 1 if splits_inputs else 0, order)


class Fp8CheckpointExpertsMethod(Fp8ExpertsMethod):
    def __init__(
        self,
        spec: ExpertsSpec,
        scheme: Fp8Scheme,
        kernels: Fp8MixtureKernels,
        mixtures: MixtureKernels,
        device: torch.device,
    ) -> None:
        blocks = None
        if scheme.block is not None:
            outputs, inputs = scheme.block
            blocks = (
                (math.gcd(outputs, spec.local), inputs),  # up's begin where those of gate end
                (outputs, inputs if spec.local == spec.intermediate_size else _least(spec.name, inputs, spec.local)),
            )
        super().__init__(spec, kernels, mixtures, device, blocks)
        self._scheme = scheme
        self.input_scale: torch.Tensor | None = None
        if scheme.activations == "static":
            self.input_scale = empty_parameter(3, spec.num_experts, dtype=torch.float32, device=device)
            self._x_scales = torch.ones(2, device=device)

    def process_weights_after_loading(self) -> None:
        if self.input_scale is not None and self._x_scales is not None:
            gate, up, down = self.input_scale.amax(1)
            self._x_scales.copy_(torch.stack((torch.maximum(gate, up), down)))

    def apply_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._scheme.activations is None:
            return self._weight_only(x, expert_ids, expert_weights, residual)
        return super().apply_experts(x, expert_ids, expert_weights, residual)

    def weight_parts(self) -> list[WeightPart]:
        spec, local = self.spec, self.spec.local
        parts = [
            replace(experts_part(spec, kind, numbers), dtypes=(FP8,))
            for kind, numbers in (
                ("gate_proj", self.gate_up[:, :local]),
                ("up_proj", self.gate_up[:, local:]),
                ("down_proj", self.down),
            )
        ]
        cut = local // self._blocks[0][0] if self._blocks is not None else local
        for index, (kind, scales) in enumerate(
            (
                ("gate_proj", self.gate_up_scale[:, :cut]),
                ("up_proj", self.gate_up_scale[:, cut:]),
                ("down_proj", self.down_scale),
            )
        ):
            parts.append(self._scale_part(kind, scales))
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
                _fill_with_noise(numbers[expert], scales[expert], generator)
        if self.input_scale is not None:
            self.input_scale.data.fill_(1.0)

    def _weight_only(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Dequantizes the experts that were chosen; all of them on GPUs, where the host does not know which."""
        weights: tuple[torch.Tensor, ...] = self.gate_up, self.gate_up_scale, self.down, self.down_scale
        if not x.is_cuda:
            chosen, expert_ids = expert_ids.unique(return_inverse=True)
            # Numbers of one byte: index_select has no FP8 on a CPU.
            weights = tuple(
                one.view(torch.uint8)[chosen].view(FP8) if one.dtype == FP8 else one[chosen] for one in weights
            )
        gate_up, gate_up_scale, down, down_scale = weights
        of_gate_up, of_down = self._blocks or (None, None)
        gate_up = dequantize(gate_up, gate_up_scale, of_gate_up).to(x.dtype)
        down = dequantize(down, down_scale, of_down).to(x.dtype)
        return self._mixtures.moe(x, expert_ids, expert_weights, gate_up, down, residual, self.spec.activation, None)

    def _scale_part(self, kind: str, target: torch.Tensor) -> WeightPart:
        spec, scheme, is_down = self.spec, self._scheme, kind == "down_proj"
        name = f"{spec.name}.{kind}.{scheme.scale}"
        size, start, local = (
            (spec.hidden_size, 0, spec.hidden_size) if is_down else (spec.intermediate_size, spec.start, spec.local)
        )
        if scheme.block is None or self._blocks is None:
            return scale_part(name, target, scheme, (spec.num_experts, size), start, None)
        block = self._blocks[1 if is_down else 0]
        outputs = _Cut.of(size, start, local, scheme.block[0], block[0])
        inputs = _Cut.of(spec.hidden_size, 0, spec.hidden_size, scheme.block[1], block[1])
        if is_down:
            inputs = _Cut.of(spec.intermediate_size, spec.start, spec.local, scheme.block[1], block[1])
        return _block_part(name, (spec.num_experts,), target, outputs, inputs, 2 if is_down else 1, None)


class OutputScales(Protocol):
    """What a checkpoint says of scales that are of outputs, or of a whole tensor."""

    @property
    def grain(self) -> str: ...  # tensor or channel

    @property
    def column(self) -> bool: ...  # scales of channels are stored as [outputs, 1]


@dataclass(frozen=True)
class _Cut:
    """Of scales along one axis: which blocks a rank reads, and what it makes of them."""

    blocks: int  # of the whole tensor
    first: int  # that this rank has a part of
    count: int
    parts: int  # that a block is cut into
    skipped: int  # parts of the first one, which are another rank's
    local: int  # parts of this rank

    @classmethod
    def of(cls, size: int, start: int, local: int, whole: int, small: int) -> _Cut:
        """A slice of `size` numbers, whose blocks are `whole` in the file and `small` here."""
        first, last = start // whole, -(-(start + local) // whole)
        return cls(-(-size // whole), first, last - first, whole // small, start % whole // small, -(-local // small))

    def apply(self, scales: torch.Tensor, axis: int) -> torch.Tensor:
        return scales.repeat_interleave(self.parts, axis).narrow(axis, self.skipped, self.local)


def _linear_block(spec: LinearSpec, block: tuple[int, int]) -> tuple[int, int]:
    """The largest blocks that fit into a rank's slice of each tensor."""
    borders = [output.start for output in spec.outputs] + [output.local for output in spec.outputs[:-1]]
    outputs = math.gcd(block[0], *borders)
    if any(output.row_order is not None and outputs % len(output.row_order) for output in spec.outputs):
        outputs = 1  # whose order is another one then
    inputs = block[1]
    if spec.local_inputs < spec.input_size:
        inputs = _least(spec.outputs[0].name, inputs, spec.local_inputs)
    return outputs, inputs


def _least(name: str, block: int, local: int) -> int:
    """Inputs of a block where a rank has `local` of a weight's. Raises ConfigError where they become too few."""
    found = math.gcd(block, local)
    if found < _LEAST_INPUTS:
        raise ConfigError(
            f"tp gives each rank {local} inputs of {name}, whose FP8 scales are of {block} each; allowed: a tp with "
            f"multiples of {_LEAST_INPUTS}"
        )
    return found


def scale_part(
    name: str,
    target: torch.Tensor,
    scheme: OutputScales,
    shape: tuple[int, ...],
    start: int,
    row_order: tuple[int, ...] | None,
) -> WeightPart:
    """target [(experts,) local outputs]. shape: [(experts,) outputs], of the whole tensor."""
    experts = len(shape) > 1
    if scheme.grain == "tensor":
        add_axis = partial(torch.unsqueeze, dim=-1)
        return WeightPart(
            name=name, shape=shape[:-1], target=target, experts=experts, output_axis=None, dtypes=_SCALE_DTYPES,
            convert=add_axis,
        )  # fmt: skip
    convert = partial(torch.squeeze, dim=-1) if scheme.column else None
    return WeightPart(
        name=name, shape=(*shape, 1) if scheme.column else shape, target=target, dim=len(shape) - 1, start=start,
        length=target.shape[-1], row_order=row_order, experts=experts, dtypes=_SCALE_DTYPES, convert=convert,
    )  # fmt: skip


def _block_part(
    name: str,
    experts: tuple[int, ...],
    target: torch.Tensor,
    outputs: _Cut,
    inputs: _Cut,
    dim: int,
    row_order: tuple[int, ...] | None,
) -> WeightPart:
    """target [(experts,) blocks of outputs, blocks of inputs]; dim: which of these the ranks split."""

    def convert(scales: torch.Tensor) -> torch.Tensor:
        scales = inputs.apply(outputs.apply(scales.float(), -2), -1)
        if row_order is None:
            return scales
        order = torch.tensor(row_order, device=scales.device)
        return scales.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)

    split = inputs if dim == len(experts) + 1 else outputs
    return WeightPart(
        name=name, shape=(*experts, outputs.blocks, inputs.blocks), target=target, dim=dim, start=split.first,
        length=split.count, experts=bool(experts), dtypes=_SCALE_DTYPES, convert=convert,
    )  # fmt: skip


def _fill_with_noise(weight: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.data.copy_(noise.normal_(0.0, _NUMBERS, generator=generator).clamp_(-LARGEST, LARGEST))
    scale.data.fill_(NOISE / _NUMBERS)
