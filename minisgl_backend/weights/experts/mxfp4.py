"""Experts that a checkpoint has in MXFP4, as gpt-oss is published: four bits a number, and a scale for each 32 inputs.

Parameters are the checkpoint's tensors, rows of gate and up by turns; once they are there, kernels lay them out anew. A
rank's slice of down's inputs is whole blocks of 32: where tp cuts a block, the border moves to the block's start, and
with it that of the rows of gate and up. So ranks may have a block more or less than others.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.candidate import on_gpu
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.moe.mxfp4.weight import BLOCK, BLOCK_BYTES, Mxfp4Weight
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec, experts_bias_part
from minisgl_backend.weights.layer import empty_parameter, fill_bias_with_noise
from minisgl_backend.weights.parts import PLAIN_DTYPES, WeightPart

_NOISE_SCALE = 120  # 2^-7: of all 16 numbers, makes a standard deviation of 0.023


class Mxfp4ExpertsMethod(ExpertsMethod):
    def __init__(
        self, spec: ExpertsSpec, kernels: ExpertsKernels[Mxfp4Weight], dtype: torch.dtype, device: torch.device
    ) -> None:
        """spec: with whole blocks, see `whole_blocks`."""
        super().__init__(spec, kernels)
        experts, local, hidden = spec.num_experts, spec.local, spec.hidden_size

        def empty(outputs: int, inputs: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
            shape = (experts, outputs, inputs // BLOCK)
            return (
                empty_parameter(*shape, BLOCK_BYTES, dtype=torch.uint8, device=device),
                empty_parameter(*shape, dtype=torch.uint8, device=device),
            )

        self.gate_up, self.gate_up_scale = empty(2 * local, hidden)
        self.down, self.down_scale = empty(hidden, local)
        self.make_biases(dtype, device)
        self._multiply_by_parameters()

    def process_weights_after_loading(self) -> None:
        if not on_gpu(self.kernels.kernels.facts):
            return
        from minisgl_backend.kernels.moe.mxfp4.grouped import pack

        def packed(*weight: torch.nn.Parameter) -> tuple[torch.nn.Parameter, ...]:
            tensors = pack(*(tensor.data for tensor in weight))
            return tuple(torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors)

        self.gate_up, self.gate_up_scale = packed(self.gate_up, self.gate_up_scale)
        self.down, self.down_scale = packed(self.down, self.down_scale)
        self._multiply_by_parameters()

    def _multiply_by_parameters(self) -> None:
        self.multiply_by(Mxfp4Weight(self.gate_up, self.gate_up_scale), Mxfp4Weight(self.down, self.down_scale))

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
