"""What a weight has to do, whatever its number format: the seam between layers and formats.

As in vLLM's `LinearMethodBase`: a method creates its parameters (its constructor), finishes them when they are loaded
(`process_weights_after_loading`) and multiplies with them (`apply_weights`). Norm, residual and activation are
arguments of the multiplication, so that a method may have one kernel for all, or one each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.kernels import LinearKernels
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels
from minisgl_backend.kernels.select import DeviceKernels
from minisgl_backend.weights.experts.method import ExpertsMethod, ExpertsSpec
from minisgl_backend.weights.layer import WeightedLayer, empty_parameter
from minisgl_backend.weights.parts import WeightPart


@dataclass(frozen=True, kw_only=True)
class LinearOutput:
    """Outputs of a linear weight that have a tensor of their own in the checkpoint."""

    name: str  # this project's, in full, without .weight or .bias
    size: int  # of the whole tensor
    start: int  # the first one of this rank
    local: int  # how many this rank has
    row_order: tuple[int, ...] | None = None  # see WeightPart.row_order

    def part(self, kind: str, shape: tuple[int, ...], target: torch.Tensor) -> WeightPart:
        """Of a tensor of that kind (weight, bias) whose first axis is this output's."""
        return WeightPart(
            name=f"{self.name}.{kind}", shape=shape, target=target, start=self.start, row_order=self.row_order
        )


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """A linear weight of one rank: outputs of the same input, one after the other."""

    outputs: tuple[LinearOutput, ...]
    input_size: int  # of the whole tensor
    input_start: int = 0  # the first input of this rank
    local_inputs: int
    bias: bool = False
    adds_bias: bool = True  # False: another rank does, and the ranks' results are summed

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs] of this rank."""
        return sum(output.local for output in self.outputs), self.local_inputs

    def rows(self) -> Iterator[tuple[LinearOutput, slice]]:
        """The outputs, and the rows of each in this rank's weight."""
        row = 0
        for output in self.outputs:
            yield output, slice(row, row + output.local)
            row += output.local


Multiply = Callable[[torch.Tensor, Any, GemmCall], torch.Tensor]  # x, the weight, the call


class Multiplies(Protocol):
    """What multiplies by the weights of a format: see `LinearKernels`."""

    def linear(self, x: torch.Tensor, weight: Any, call: GemmCall = BARE) -> torch.Tensor: ...

    def prepare(self, weights: Sequence[Any], rows: Sequence[int], longest: int = 0) -> None: ...

    @property
    def direct(self) -> Multiply: ...


class LinearMethod(WeightedLayer, ABC):
    """One linear weight and how it is multiplied with. Its constructor takes a `LinearSpec` and makes the parameters,
    which `weight_parts` then names.
    """

    spec: LinearSpec
    operand: Any  # see `multiply_by`
    multiply: Multiply  # as `apply_weights`, with the operand, and a call that has `added_bias` and no `out`
    added_bias: torch.Tensor | None
    kernels: Multiplies
    bias: torch.Tensor | None

    def __init__(self, spec: LinearSpec) -> None:
        super().__init__()
        self.spec, self.bias = spec, None

    def make_bias(self, dtype: torch.dtype, device: torch.device) -> None:
        """Where the weight has one."""
        if self.spec.bias:
            self.bias = empty_parameter(self.spec.shape[0], dtype=dtype, device=device)

    def multiply_by(self, kernels: Multiplies, operand: Any) -> None:
        """From now on, `apply_weights` is `kernels.linear` with this operand: the weight as its format has it."""
        # Plain attributes: a module's own look-up takes longer, and a tensor here is no parameter of its own.
        bias = self.bias if self.spec.adds_bias else None
        self.__dict__.update(kernels=kernels, multiply=kernels.direct, operand=operand, added_bias=bias)

    def apply_weights(self, x: torch.Tensor, call: GemmCall = BARE) -> torch.Tensor:
        """epilogue(norm(x) @ weight.T + bias), x [num_tokens, local inputs] -> [num_tokens, local outputs].

        call: see `GemmCall`; its bias is the weight's own, and not the caller's to give. With an activation the
        weight holds gate rows, then as many up rows, and the result is half as wide.
        """
        if self.added_bias is not None:
            call = GemmCall(call.norm_weight, call.eps, self.added_bias, *call[3:])
        return self.kernels.linear(x, self.operand, call)

    def fed_by(self, other: LinearMethod) -> Fp8Weight | None:
        """The weight, where results of `other` may come quantized to it: FP8, of the same kernels. See
        `GemmCall.feeds`."""
        return self.operand if isinstance(self.operand, Fp8Weight) and self.kernels is other.kernels else None

    def apply_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`apply_weights` without norm and epilogue into out [num_tokens, local outputs]: see `GemmCall.out`."""
        self.apply_weights(x, GemmCall(out=out))

    def process_weights_after_loading(self) -> None:
        """Called once, when all parameters are filled: to repack them, or to derive others."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of an embedding's weight as numbers: ids int [count] -> [count, inputs]; not of all methods."""
        raise NotImplementedError(f"{type(self).__name__} has no single rows")

    def output_rows(self, spec: LinearSpec) -> LinearMethod:
        """Of an embedding: the rows of `spec` as a weight that shares its numbers; not of all methods."""
        raise NotImplementedError(f"{type(self).__name__} has no single rows")

    def dequantized(self) -> torch.Tensor:
        """The weight [outputs, inputs] of this rank as plain numbers, once it is loaded; not of all methods."""
        raise NotImplementedError(f"{type(self).__name__} has no plain numbers")

    @property
    def streamed_weight(self) -> torch.Tensor | Fp8Weight | None:
        """The weight [outputs, inputs] as a kernel reads it that computes another layer, too: in the model's own number
        format or in FP8, and without a bias; None: it is another."""
        return self.operand if self.bias is None and isinstance(self.operand, torch.Tensor | Fp8Weight) else None

    def repacked_bytes(self) -> int:
        """What `add_repacked` takes on this device, once the weight is loaded; 0: there is nothing to be added."""
        return 0

    def add_repacked(self) -> str | None:
        """Holds the weight once more, for a kernel that is faster at some row counts. The layout's name; None: there is
        none, or the weight has numbers that it does not hold."""
        return None

    def prepare(self, alike: Sequence[LinearMethod], rows: Sequence[int], longest: int = 0) -> None:
        """Chooses kernels for this weight and those `alike` (of its class and shape, itself among them): for these
        decode row counts, and for prefill up to `longest` rows. Called before anything is captured, or not at all."""
        self.kernels.prepare([one.operand for one in alike], rows, longest)

    def weight_parts(self) -> list[WeightPart]:
        parts = []
        for index, (output, rows) in enumerate(self.spec.rows()):
            parts += self.parts_of(output, rows, index)
            if self.bias is not None:
                parts.append(output.part("bias", (output.size,), self.bias[rows]))
        return parts

    @abstractmethod
    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        """The parts of one output but its bias; rows: its own in this rank's weight, index: of the output."""


class MethodFactory(ABC):
    """Makes the methods of one format, which share what is one a device (vLLM's `QuantizationConfig`)."""

    weight_format: str

    def __init__(
        self, kernels: DeviceKernels, dtype: torch.dtype, device: torch.device, parameters: Any = None
    ) -> None:
        """dtype: of the model, its activations and its plain weights, whose kernels are `kernels`. parameters: what the
        format's reader made of the checkpoint's quantization_config; None: weights are converted while they load."""
        self.kernels, self.dtype, self.device, self.parameters = kernels, dtype, device, parameters

    @cached_property
    def gemms(self) -> LinearKernels[Any]:
        """Of linear weights in this format."""
        return LinearKernels(self.weight_format, self.kernels.gemms)

    @cached_property
    def mixtures(self) -> ExpertsKernels[Any]:
        """Of experts in this format."""
        return ExpertsKernels(self.weight_format, self.kernels.mixtures)

    @abstractmethod
    def linear(self, spec: LinearSpec) -> LinearMethod: ...

    @abstractmethod
    def experts(self, spec: ExpertsSpec) -> ExpertsMethod: ...


def process_weights_after_loading(model: nn.Module) -> None:
    """Of all weights of a model."""
    for module in model.modules():
        if isinstance(module, (LinearMethod, ExpertsMethod)):
            module.process_weights_after_loading()
