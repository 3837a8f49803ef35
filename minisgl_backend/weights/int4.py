"""The format `int4`: weights that a checkpoint has in 4 bits (AWQ, GPTQ, compressed-tensors), activations in 16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.int4_second import Layout, Repacker, layout_of
from minisgl_backend.kernels.linear.int4_torch import (
    MIDDLE,
    Int4Weight,
    dequantize,
    pack,
    padded_inputs,
    unpack,
)
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.kernels.moe.int4_torch import Int4MixtureKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.weights.int4_checkpoint import (
    Axis,
    Int4Groups,
    Int4Slice,
    groups_in_order,
    numbers_part,
    order_part,
    read_order,
    scales_part,
    zeros_part,
)
from minisgl_backend.weights.layer import NOISE, empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import (
    ExpertsMethod,
    ExpertsSpec,
    LinearMethod,
    LinearOutput,
    LinearSpec,
    MethodFactory,
)
from minisgl_backend.weights.parts import WeightPart
from minisgl_backend.weights.schemes.int4 import Int4Scheme

_DEVIATION = 4.6  # of a random number of 0 to 15


class _Reordered:
    """Multiplies by weights whose inputs are in another order than those of x."""

    def __init__(self, kernels: LinearKernels[Int4Weight], order: torch.Tensor) -> None:
        self._kernels, self._order = kernels, order
        self.prepare = kernels.prepare

    def linear(self, x: torch.Tensor, weight: Int4Weight, call: GemmCall = BARE) -> torch.Tensor:
        if call.norm_weight is not None:
            x, call = self._kernels.ops.rms_norm(x, call.norm_weight, call.eps), call._replace(norm_weight=None)
        return self._kernels.linear(x.index_select(1, self._order), weight, call)


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
        self.words, self.scales, self.zeros = _empty((), *spec.shape, scheme, self._groups, dtype, device)
        self.make_bias(dtype, device)
        self.group_of_input: torch.Tensor | None = None
        if scheme.act_order:
            in_order = groups_in_order(spec.input_size, self._groups.stored, device)
            self.group_of_input = empty_parameter(len(spec.outputs), spec.input_size, dtype=torch.int32, device=device)
            self.group_of_input.data.copy_(in_order.expand_as(self.group_of_input))
        self._order: torch.Tensor | None = None  # of the inputs, as the weight has them
        self.multiply_by(kernels, _weight(self.words, self.scales, self.zeros, spec.local_inputs, self._groups))

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
        if not _is_in_order(first, self._groups.stored):
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
        self.multiply_by(self._kernels, replace(self.operand, repacked=repacked))
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
        parts = _parts(self._scheme, self._groups, of, self.words[rows], self.scales[:, rows], zeros)
        if self.group_of_input is not None:
            parts.append(order_part(self._scheme, of, self.group_of_input[index], self._checked_order))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        _fill_with_noise(self.words, self.scales, self.zeros, generator)
        fill_bias_with_noise(self.bias, generator)

    def _checked_order(self, groups: torch.Tensor) -> torch.Tensor:
        """The group of each input of the whole weight."""
        name, size = self.spec.outputs[0].name, self._groups.stored
        groups = read_order(groups, size, name)
        if self._inputs.is_split and not _is_in_order(groups, size):
            raise ConfigError(
                f"desc_act is true, and {name} has its inputs in an order of its own, which ranks cannot split; "
                "allowed: tp 1"
            )
        return groups


class Int4ExpertsMethod(ExpertsMethod):
    def __init__(
        self,
        spec: ExpertsSpec,
        scheme: Int4Scheme,
        kernels: Int4MixtureKernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self._scheme, self._kernels = spec, scheme, kernels
        self._hidden = Axis(spec.hidden_size, 0, spec.hidden_size)
        self._inner = Axis(spec.intermediate_size, spec.start, spec.local)
        self._of_gate_up = Int4Groups.of(spec.name, scheme, self._hidden)
        self._of_down = Int4Groups.of(spec.name, scheme, self._inner)
        experts = (spec.num_experts,)
        self.gate_up, self.gate_up_scales, self.gate_up_zeros = _empty(
            experts, 2 * spec.local, spec.hidden_size, scheme, self._of_gate_up, dtype, device
        )
        self.down, self.down_scales, self.down_zeros = _empty(
            experts, spec.hidden_size, spec.local, scheme, self._of_down, dtype, device
        )
        self._gate_up = _weight(
            self.gate_up, self.gate_up_scales, self.gate_up_zeros, spec.hidden_size, self._of_gate_up
        )
        self._down = _weight(self.down, self.down_scales, self.down_zeros, spec.local, self._of_down)
        self.groups_of_inputs: list[torch.Tensor] = []  # of gate, up and down, only to be checked
        if scheme.act_order:
            sizes = [spec.hidden_size, spec.hidden_size, spec.intermediate_size]
            self.groups_of_inputs = [
                torch.empty(spec.num_experts, size, dtype=torch.int32, device=device) for size in sizes
            ]

    def process_weights_after_loading(self) -> None:
        self.groups_of_inputs = []

    def apply_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.moe(
            x, expert_ids, expert_weights, self._gate_up, self._down, residual, self.spec.activation
        )

    def apply_routed(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        *,
        router_bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        spec = self.spec
        return self._kernels.mixture(
            x, router, self._gate_up, self._down, spec.experts_per_token, spec.renormalize, router_bias=router_bias,
            norm_weight=norm_weight, eps=eps, residual=residual, activation=spec.activation,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        local, parts = self.spec.local, []
        for kind, rows in (("gate_proj", slice(0, local)), ("up_proj", slice(local, 2 * local))):
            zeros = None if self.gate_up_zeros is None else self.gate_up_zeros[..., rows]
            parts += _parts(
                self._scheme, self._of_gate_up, self._slice(kind, self._inner, self._hidden), self.gate_up[:, rows],
                self.gate_up_scales[..., rows], zeros,
            )  # fmt: skip
        down = self._slice("down_proj", self._hidden, self._inner)
        parts += _parts(self._scheme, self._of_down, down, self.down, self.down_scales, self.down_zeros)
        of_gate, of_up = (self._slice(kind, self._inner, self._hidden) for kind in ("gate_proj", "up_proj"))
        for of, target in zip((of_gate, of_up, down), self.groups_of_inputs, strict=False):
            parts.append(order_part(self._scheme, of, target, self._checked_order))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        _fill_with_noise(self.gate_up, self.gate_up_scales, self.gate_up_zeros, generator)
        _fill_with_noise(self.down, self.down_scales, self.down_zeros, generator)

    def _checked_order(self, groups: torch.Tensor) -> torch.Tensor:
        """The groups of one expert's inputs."""
        size = (self._of_gate_up if len(groups) == self.spec.hidden_size else self._of_down).stored
        groups = read_order(groups, size, self.spec.name)
        if not _is_in_order(groups, size):
            raise ConfigError(
                f"desc_act is true, and {self.spec.name} have their inputs in orders of their own; allowed: false"
            )
        return groups

    def _slice(self, kind: str, outputs: Axis, inputs: Axis) -> Int4Slice:
        return Int4Slice(name=f"{self.spec.name}.{kind}", outputs=outputs, inputs=inputs, experts=self.spec.num_experts)


class Int4Factory(MethodFactory):
    parameters: Int4Scheme

    def __init__(
        self, kernels: DeviceKernels, dtype: torch.dtype, device: torch.device, parameters: Any = None
    ) -> None:
        super().__init__(kernels, dtype, device, parameters)
        self._int4, self._mixtures = _kernels(kernels)

    def linear(self, spec: LinearSpec) -> Int4LinearMethod:
        return Int4LinearMethod(spec, self.parameters, self._int4, self.dtype, self.device)

    def experts(self, spec: ExpertsSpec) -> Int4ExpertsMethod:
        if spec.bias:
            raise ConfigError(f"{spec.name} have biases; allowed with 4-bit weights: experts without")
        return Int4ExpertsMethod(spec, self.parameters, self._mixtures, self.dtype, self.device)


def _kernels(kernels: DeviceKernels) -> tuple[LinearKernels[Int4Weight], Int4MixtureKernels]:
    int4: LinearKernels[Int4Weight] = LinearKernels("int4", kernels.gemms)
    if not kernels.on_gpu:
        return int4, Int4MixtureKernels(kernels.mixtures)
    from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
    from minisgl_backend.kernels.moe.int4_gpu import TritonInt4MixtureKernels

    assert isinstance(kernels.mixtures, TritonMixtureKernels), "the facts are those of its device"
    kernels.gemms.scratch  # noqa: B018  made before the weights
    return int4, TritonInt4MixtureKernels(kernels.mixtures)


def _empty(
    experts: Sequence[int],
    outputs: int,
    inputs: int,
    scheme: Int4Scheme,
    groups: Int4Groups,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter | None]:
    """Words, scales and zero points: see `Int4Weight`."""
    words = padded_inputs(inputs, groups.plane) // 8
    of_groups = (*experts, groups.count(inputs), outputs)
    return (
        empty_parameter(*experts, outputs, words, dtype=torch.int32, device=device),
        empty_parameter(*of_groups, dtype=dtype, device=device),
        None if scheme.symmetric else empty_parameter(*of_groups, dtype=torch.uint8, device=device),
    )


def _weight(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size_in: int, groups: Int4Groups
) -> Int4Weight:
    """Parameters are filled in place."""
    return Int4Weight(
        words=words, scales=scales, zeros=zeros, size_in=size_in, group=groups.group, plane=groups.plane
    )  # fmt: skip


def _parts(
    scheme: Int4Scheme,
    groups: Int4Groups,
    of: Int4Slice,
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
) -> list[WeightPart]:
    found = [numbers_part(scheme, groups, of, words), scales_part(scheme, groups, of, scales)]
    return found if zeros is None else [*found, zeros_part(scheme, groups, of, zeros)]


def _is_in_order(groups: torch.Tensor, size: int) -> bool:
    """Whether input i is in group i // size."""
    return torch.equal(groups, groups_in_order(len(groups), size, groups.device).to(groups.dtype))


def _fill_with_noise(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, generator: torch.Generator
) -> None:
    words.data.random_(-(2**31), 2**31, generator=generator)
    scales.data.fill_(NOISE / _DEVIATION)
    if zeros is not None:
        zeros.data.fill_(MIDDLE)
