"""The format `int4`: weights that a checkpoint has in 4 bits (AWQ, GPTQ, compressed-tensors), activations in 16."""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.int4.reference import (
    Int4Weight,
    dequantize,
    pack,
    unpack,
)
from minisgl_backend.kernels.linear.int4.repacked import Layout, Repacker, layout_of
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.weights.experts.int4 import Int4ExpertsMethod
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.int4_checkpoint import (
    Axis,
    Int4Groups,
    Int4Slice,
    groups_in_order,
    order_part,
    read_order,
)
from minisgl_backend.weights.int4_parameters import (
    empty_parameters,
    fill_with_noise,
    is_in_order,
    parts_of_weight,
    weight_of,
)
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import (
    LinearMethod,
    LinearOutput,
    LinearSpec,
    MethodFactory,
)
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.schemes.int4 import Int4Scheme


class _Reordered:
    """Multiplies by weights whose inputs are in another order than those of x."""

    def __init__(self, kernels: LinearKernels[Int4Weight], order: torch.Tensor) -> None:
        self._kernels, self._order = kernels, order
        self.prepare = kernels.prepare

    def linear(self, x: torch.Tensor, weight: Int4Weight, call: GemmCall = BARE) -> torch.Tensor:
        if call.norm_weight is not None:
            x, call = self._kernels.ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)
        return self._kernels.linear(x.index_select(1, self._order), weight, call)

    direct = linear


class Int4LinearMethod(LinearMethod):
    def __init__(
        self,
        spec: LinearSpec,
        scheme: Int4Scheme,
        kernels: LinearKernels[Int4Weight],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec)
        self._scheme, self._int4 = scheme, kernels
        self._inputs = Axis(spec.input_size, spec.input_start, spec.local_inputs)
        self._groups = Int4Groups.of(spec.outputs[0].name, scheme, self._inputs)
        self.words, self.scales, self.zeros = empty_parameters((), *spec.shape, scheme, self._groups, dtype, device)
        self.make_bias(dtype, device)
        self.group_of_input: torch.Tensor | None = None
        if scheme.act_order:
            in_order = groups_in_order(spec.input_size, self._groups.stored, device)
            self.group_of_input = empty_parameter(len(spec.outputs), spec.input_size, dtype=torch.int32, device=device)
            self.group_of_input.data.copy_(in_order.expand_as(self.group_of_input))
        self._order: torch.Tensor | None = None  # of the inputs, as the weight has them
        self.multiply_by(kernels, weight_of(self.words, self.scales, self.zeros, spec.local_inputs, self._groups))

    def dequantized(self) -> torch.Tensor:
        weight = dequantize(self.operand, self.scales.dtype)
        return weight if self._order is None else weight.index_select(1, self._order.argsort())

    def process_weights_after_loading(self) -> None:
        if self.group_of_input is None:
            return
        first, *others = self.group_of_input
        if any(not torch.equal(first, other) for other in others):
            names = ", ".join(output.name for output in self.spec.outputs)
            raise ConfigError(
                f"desc_act is true, and {names} have their inputs in different orders; allowed: one order for layers "
                "that are multiplied together"
            )
        if not is_in_order(first, self._groups.stored):
            self._order = torch.argsort(first, stable=True)
            numbers = unpack(self.words.data, self.spec.local_inputs, self._groups.plane)
            self.words.data.copy_(pack(numbers.index_select(1, self._order), self._groups.plane))
            self.multiply_by(_Reordered(self._int4, self._order), self.operand)
        self.group_of_input = None

    def repacked_bytes(self) -> int:
        found = self._layout()
        return 0 if found is None else found[0].bytes(self.operand)

    def add_repacked(self) -> str | None:
        found = self._layout()
        repacked = None if found is None else found[1].repack(self.operand)
        self.multiply_by(self.kernels, replace(self.operand, repacked=repacked))
        return None if repacked is None else repacked.layout

    def _layout(self) -> tuple[Layout, Repacker] | None:
        device = self._int4.device
        return layout_of(self.operand, device.device, device.facts)

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        of = Int4Slice(
            name=output.name,
            outputs=Axis(output.size, output.start, output.local),
            inputs=self._inputs,
            row_order=output.row_order,
        )
        zeros = None if self.zeros is None else self.zeros[:, rows]
        parts = parts_of_weight(self._scheme, self._groups, of, self.words[rows], self.scales[:, rows], zeros)
        if self.group_of_input is not None:
            parts.append(order_part(self._scheme, of, self.group_of_input[index], self._checked_order))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        fill_with_noise(self.words, self.scales, self.zeros, generator)
        fill_bias_with_noise(self.bias, generator)

    def _checked_order(self, groups: torch.Tensor) -> torch.Tensor:
        """The group of each input of the whole weight."""
        name, size = self.spec.outputs[0].name, self._groups.stored
        groups = read_order(groups, size, name)
        if self._inputs.is_split and not is_in_order(groups, size):
            raise ConfigError(
                f"desc_act is true, and {name} has its inputs in an order of its own, which ranks cannot split; "
                "allowed: tp 1"
            )
        return groups


class Int4Factory(MethodFactory):
    parameters: Int4Scheme

    weight_format = "int4"

    def linear(self, spec: LinearSpec) -> Int4LinearMethod:
        if self.kernels.on_gpu:
            self.kernels.gemms.scratch  # noqa: B018  made before anything is captured
        return Int4LinearMethod(spec, self.parameters, self.gemms, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> Int4ExpertsMethod:
        if spec.bias:
            raise ConfigError(f"{spec.name} have biases; allowed with 4-bit weights: experts without")
        return Int4ExpertsMethod(spec, self.parameters, self.mixtures, self.dtype, self.device)
