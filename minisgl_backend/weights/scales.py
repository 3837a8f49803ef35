"""Scales of weights of one byte a number, of linear layers and of experts: their parameters, and their parts of a
checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.fp8.reference import LARGEST, quantize_outputs
from minisgl_backend.weights.layer import NOISE, empty_parameter
from minisgl_backend.weights.parts import PLAIN_DTYPES, WeightPart

_SCALE_DTYPES = (*PLAIN_DTYPES, torch.float8_e8m0fnu)
_LEAST_INPUTS = 32  # of a block: what the matrix units multiply at once
_FP8_NUMBERS = 100.0  # standard deviation of random FP8 numbers, of which the largest is 448
_INT8_NUMBERS = 73  # standard deviation of a random number of -127 to 127
Block: TypeAlias = tuple[int, int]  # outputs and inputs with one scale


def empty_scales(
    experts: int | None, shape: tuple[int, int], block: Block | None, device: torch.device
) -> torch.nn.Parameter:
    """float32 [(experts,) outputs], or one a block: [(experts,) blocks of outputs, blocks of inputs]."""
    sizes = shape[:1] if block is None else tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    return empty_parameter(*(() if experts is None else (experts,)), *sizes, dtype=torch.float32, device=device)


class OutputScales(Protocol):
    """What a checkpoint says of scales that are of outputs, or of a whole tensor."""

    @property
    def grain(self) -> str: ...  # tensor or channel

    @property
    def column(self) -> bool: ...  # scales of channels are stored as [outputs, 1]


@dataclass(frozen=True)
class Cut:
    """Of scales along one axis: which blocks a rank reads, and what it makes of them."""

    blocks: int  # of the whole tensor
    first: int  # that this rank has a part of
    count: int
    parts: int  # that a block is cut into
    skipped: int  # parts of the first one, which are another rank's
    local: int  # parts of this rank

    @classmethod
    def of(cls, size: int, start: int, local: int, whole: int, small: int) -> Cut:
        """A slice of `size` numbers, whose blocks are `whole` in the file and `small` here."""
        first, last = start // whole, -(-(start + local) // whole)
        return cls(-(-size // whole), first, last - first, whole // small, start % whole // small, -(-local // small))

    def apply(self, scales: torch.Tensor, axis: int) -> torch.Tensor:
        return scales.repeat_interleave(self.parts, axis).narrow(axis, self.skipped, self.local)


def least_block(name: str, block: int, local: int) -> int:
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


def block_part(
    name: str,
    experts: tuple[int, ...],
    target: torch.Tensor,
    outputs: Cut,
    inputs: Cut,
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


def quantized(part: WeightPart, scale: torch.Tensor, first_input: int, inputs: int) -> WeightPart:
    """The part with FP8 numbers and scales. Where inputs are split over ranks, all are read for the scale."""
    splits_inputs = part.dim == len(part.shape) - 1

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = quantize_outputs(values)
        return (numbers[..., first_input : first_input + inputs] if splits_inputs else numbers), scales

    return replace(part, quantize=quantize, scale=scale, whole=splits_inputs)


def quantize_and_fill_with_noise(weight: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    numbers, scales = quantize_outputs(noise.normal_(0.0, NOISE, generator=generator))
    weight.copy_(numbers)
    scale.copy_(scales)


def fill_fp8_with_noise(weight: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    weight.data.copy_(noise.normal_(0.0, _FP8_NUMBERS, generator=generator).clamp_(-LARGEST, LARGEST))
    scale.data.fill_(NOISE / _FP8_NUMBERS)


def fill_int8_with_noise(weight: torch.Tensor, scale: torch.Tensor, generator: torch.Generator) -> None:
    weight.data.random_(-127, 128, generator=generator)
    scale.data.fill_(NOISE / _INT8_NUMBERS)
