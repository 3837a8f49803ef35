"""Experts that a checkpoint has in MXFP4, as gpt-oss is published: four bits a number, and a scale for each 32 inputs.

Parameters are the checkpoint's tensors, rows of gate and up by turns; once they are there, kernels lay them out anew. A
rank's slice of down's inputs is whole blocks of 32: where tp cuts a block, the border moves to the block's start, and
with it that of the rows of gate and up. So ranks may have a block more or less than others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.moe.mxfp4_torch import BLOCK, BLOCK_BYTES, Mxfp4Kernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.method import ExpertsMethod, ExpertsSpec, LinearMethod, LinearSpec, MethodFactory
from minisgl_backend.weights.parts import PLAIN_DTYPES, WeightPart
from minisgl_backend.weights.plain import experts_bias_part

_NOISE_SCALE = 120  # 2^-7: of all 16 numbers, makes a standard deviation of 0.023


class Mxfp4ExpertsMethod(ExpertsMethod):
    def __init__(self, spec: ExpertsSpec, kernels: Mxfp4Kernels, dtype: torch.dtype, device: torch.device) -> None:
        """spec: with whole blocks, see `whole_blocks`."""
        super().__init__()
        self.spec, self._kernels = spec, kernels
        experts, local, hidden = spec.num_experts, spec.local, spec.hidden_size

        def numbers(outputs: int, inputs: int) -> torch.nn.Parameter:
            return empty_parameter(
                experts, outputs, inputs // BLOCK, BLOCK_BYTES, dtype=torch.uint8, device=device
            )  # fmt: skip

        def scales(outputs: int, inputs: int) -> torch.nn.Parameter:
            return empty_parameter(experts, outputs, inputs // BLOCK, dtype=torch.uint8, device=device)

        self.gate_up, self.gate_up_scale = numbers(2 * local, hidden), scales(2 * local, hidden)
        self.down, self.down_scale = numbers(hidden, local), scales(hidden, local)
        self.gate_up_bias: torch.Tensor | None = None
        self.down_bias: torch.Tensor | None = None
        self._biases: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if spec.bias:
            self.gate_up_bias = empty_parameter(experts, 2 * local, dtype=dtype, device=device)
            self.down_bias = empty_parameter(experts, hidden, dtype=dtype, device=device)
            self._biases = (self.gate_up_bias, self.down_bias if spec.adds_bias else None)  # filled in place

    def process_weights_after_loading(self) -> None:
        self.gate_up, self.gate_up_scale = self._packed(self.gate_up, self.gate_up_scale)
        self.down, self.down_scale = self._packed(self.down, self.down_scale)

    def _packed(self, *weight: torch.nn.Parameter) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        numbers, scales = self._kernels.pack(*(tensor.data for tensor in weight))
        return torch.nn.Parameter(numbers, requires_grad=False), torch.nn.Parameter(scales, requires_grad=False)

    def apply_experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernels.moe(
            x, expert_ids, expert_weights, (self.gate_up, self.gate_up_scale), (self.down, self.down_scale), residual,
            self.spec.activation, self._biases,
        )  # fmt: skip

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
            x, router, (self.gate_up, self.gate_up_scale), (self.down, self.down_scale), spec.experts_per_token,
            spec.renormalize, norm_weight=norm_weight, eps=eps, residual=residual, activation=spec.activation,
            router_bias=router_bias, biases=self._biases,
        )  # fmt: skip

    def weight_parts(self) -> list[WeightPart]:
        spec = self.spec
        whole_gate_up = (spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size // BLOCK)
        whole_down = (spec.num_experts, spec.hidden_size, spec.intermediate_size // BLOCK)
        parts = [
            _part(f"{spec.name}.gate_up_proj.blocks", (*whole_gate_up, BLOCK_BYTES), self.gate_up, 1, 2 * spec.start),
            _part(f"{spec.name}.gate_up_proj.scales", whole_gate_up, self.gate_up_scale, 1, 2 * spec.start),
            _part(f"{spec.name}.down_proj.blocks", (*whole_down, BLOCK_BYTES), self.down, 2, spec.start // BLOCK),
            _part(f"{spec.name}.down_proj.scales", whole_down, self.down_scale, 2, spec.start // BLOCK),
        ]
        if self.gate_up_bias is not None and self.down_bias is not None:
            name, shape = f"{spec.name}.gate_up_proj.bias", whole_gate_up[:2]
            parts.append(_part(name, shape, self.gate_up_bias, 1, 2 * spec.start, PLAIN_DTYPES))
            parts.append(experts_bias_part(spec, "down_proj", self.down_bias))
        return parts

    def fill_with_noise(self, generator: torch.Generator) -> None:
        for blocks in (self.gate_up, self.down):
            blocks.data.random_(0, 256, generator=generator)
        for scales in (self.gate_up_scale, self.down_scale):
            scales.data.fill_(_NOISE_SCALE)
        for bias in (self.gate_up_bias, self.down_bias):
            fill_bias_with_noise(bias, generator)


class Mxfp4Factory(MethodFactory):
    """Of a checkpoint: weights are not converted to MXFP4 while they load."""

    def __init__(
        self, kernels: DeviceKernels, dtype: torch.dtype, device: torch.device, parameters: object = None
    ) -> None:
        super().__init__(kernels, dtype, device, parameters)
        self._kernels = _kernels(kernels)

    def linear(self, spec: LinearSpec) -> LinearMethod:
        raise ConfigError(
            f"quantization_config makes {spec.outputs[0].name} MXFP4; allowed: experts alone, with all else in "
            "modules_to_not_convert"
        )

    def experts(self, spec: ExpertsSpec) -> Mxfp4ExpertsMethod:
        return Mxfp4ExpertsMethod(whole_blocks(spec), self._kernels, self.dtype, self.device)


def whole_blocks(spec: ExpertsSpec) -> ExpertsSpec:
    """The same with this rank's slice moved to whole blocks. Raises ConfigError where sizes are no whole blocks, or no
    block is left for this rank."""
    for key, size in (("hidden_size", spec.hidden_size), ("intermediate_size", spec.intermediate_size)):
        if size % BLOCK:
            raise ConfigError(f"{key} is {size}; allowed for MXFP4 experts: multiples of {BLOCK}")
    start, end = (border // BLOCK * BLOCK for border in (spec.start, spec.start + spec.local))
    if start == end:
        raise ConfigError(
            f"tp gives a rank {spec.local} of an MXFP4 expert's {spec.intermediate_size} columns; allowed: {BLOCK} or "
            "more"
        )
    return replace(spec, start=start, local=end - start)


def _part(
    name: str,
    shape: tuple[int, ...],
    target: torch.Tensor,
    dim: int,
    start: int,
    dtypes: tuple[torch.dtype, ...] = (torch.uint8,),
) -> WeightPart:
    return WeightPart(name=name, shape=shape, target=target, dim=dim, start=start, experts=True, dtypes=dtypes)


def _kernels(kernels: DeviceKernels) -> Mxfp4Kernels:
    if not kernels.on_gpu:
        return Mxfp4Kernels(kernels.mixtures)
    from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
    from minisgl_backend.kernels.moe.mxfp4_gpu import TritonMxfp4Kernels

    assert isinstance(kernels.mixtures, TritonMixtureKernels), "the facts are those of its device"
    return TritonMxfp4Kernels(kernels.mixtures)
