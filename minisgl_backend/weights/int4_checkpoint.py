"""How checkpoints store 4-bit weights, and the parts that repack them into the layout of kernels/linear/int4.

AWQ packs eight outputs into a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits, GPTQ eight inputs and
compressed-tensors eight inputs, both one after the other; zero points lie in words of eight outputs. Words that a rank
has a part of are read whole. Groups of inputs that a rank's slice cuts are cut into smaller ones with the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.linear.int4.reference import LEAST_GROUP, num_groups, pack, plane_size, rows_at_once
from minisgl_backend.weights.parts import PLAIN_DTYPES, WeightPart
from minisgl_backend.weights.schemes.int4 import Int4Scheme

IN_WORD = 8  # numbers
_IN_ORDER = tuple(range(IN_WORD))
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of outputs and inputs (or groups of them), or of inputs and outputs."""

    suffix: str
    outputs_first: bool
    packed: Literal["outputs", "inputs"] | None = None
    order: tuple[int, ...] = _IN_ORDER  # of the numbers in a word


@dataclass(frozen=True)
class _Layout:
    numbers: _Tensor
    scales: _Tensor
    zeros: _Tensor
    order: str  # suffix of the tensor with each input's group


_LAYOUTS: Mapping[str, _Layout] = MappingProxyType(
    {
        "awq": _Layout(
            _Tensor("qweight", False, "outputs", _AWQ_ORDER),
            _Tensor("scales", False),
            _Tensor("qzeros", False, "outputs", _AWQ_ORDER),
            "g_idx",
        ),
        "gptq": _Layout(
            _Tensor("qweight", False, "inputs"),
            _Tensor("scales", False),
            _Tensor("qzeros", False, "outputs"),
            "g_idx",
        ),
        "pack-quantized": _Layout(
            _Tensor("weight_packed", True, "inputs"),
            _Tensor("weight_scale", True),
            _Tensor("weight_zero_point", True, "outputs"),
            "weight_g_idx",
        ),
    }
)


@dataclass(frozen=True)
class Axis:
    """Outputs or inputs of a weight: the whole, and what this rank has."""

    size: int
    start: int
    local: int

    @property
    def is_split(self) -> bool:
        return self.local < self.size

    def cut(self, length: int) -> Axis:
        """The pieces of `length` that cover it."""
        first, end = self.start // length, -(-(self.start + self.local) // length)
        return Axis(-(-self.size // length), first, end - first)


@dataclass(frozen=True, kw_only=True)
class Int4Slice:
    """The weight of one tensor of outputs, or of one kind of experts, that this rank has."""

    name: str  # this project's, in full
    outputs: Axis
    inputs: Axis
    experts: int | None = None
    row_order: tuple[int, ...] | None = None  # see WeightPart.row_order


@dataclass(frozen=True, kw_only=True)
class Int4Groups:
    """Groups of inputs of a weight: in the checkpoint, and in memory, where they may be smaller."""

    stored: int
    group: int
    plane: int

    @classmethod
    def of(cls, name: str, scheme: Int4Scheme, inputs: Axis) -> Int4Groups:
        """Raises ConfigError where a rank's slice makes groups too small."""
        if scheme.group < 0 or scheme.group >= inputs.size:
            plane = plane_size(inputs.local, 2 * LEAST_GROUP)
            whole = 8 * plane * -(-inputs.local // (8 * plane))
            return cls(stored=inputs.size, group=whole, plane=plane)
        group = math.gcd(scheme.group, inputs.local) if inputs.is_split else scheme.group
        if group % LEAST_GROUP:
            raise ConfigError(
                f"tp gives each rank {inputs.local} inputs of {name}, whose 4-bit scales are of {scheme.group} each; "
                f"allowed: a tp with multiples of {LEAST_GROUP}"
            )
        return cls(stored=scheme.group, group=group, plane=plane_size(inputs.local, group))

    def count(self, size_in: int) -> int:
        return num_groups(size_in, self.group, self.plane)


def numbers_part(scheme: Int4Scheme, groups: Int4Groups, of: Int4Slice, target: torch.Tensor) -> WeightPart:
    """target: words int32 [(experts,) local outputs, padded local inputs / 8]."""

    def finish(numbers: torch.Tensor) -> torch.Tensor:
        return pack(numbers, groups.plane)

    return _part(_LAYOUTS[scheme.layout].numbers, of, of.inputs, target, finish)


def scales_part(scheme: Int4Scheme, groups: Int4Groups, of: Int4Slice, target: torch.Tensor) -> WeightPart:
    """target [(experts,) groups, local outputs]."""
    return _of_groups(_LAYOUTS[scheme.layout].scales, groups, of, target, 0)


def zeros_part(scheme: Int4Scheme, groups: Int4Groups, of: Int4Slice, target: torch.Tensor) -> WeightPart:
    """target: uint8 [(experts,) groups, local outputs]."""
    return _of_groups(_LAYOUTS[scheme.layout].zeros, groups, of, target, scheme.zero_offset)


def order_part(
    scheme: Int4Scheme, of: Int4Slice, target: torch.Tensor, check: Callable[[torch.Tensor], torch.Tensor]
) -> WeightPart:
    """target: int32 [(experts,) inputs], the group of each input of the whole weight, which keeps what it has where the
    file has none. check: raises where it cannot be served."""
    shape = (*(() if of.experts is None else (of.experts,)), of.inputs.size)
    return WeightPart(
        name=f"{of.name}.{_LAYOUTS[scheme.layout].order}",
        shape=shape,
        target=target,
        dim=len(shape) - 1,
        experts=of.experts is not None,
        output_axis=None,
        dtypes=(torch.int32,),
        convert=check,
        optional=True,
    )


def groups_in_order(size: int, group: int, device: torch.device) -> torch.Tensor:
    """int32 [inputs]: that of each input, where each group has the inputs after those of the one before."""
    return torch.arange(size, dtype=torch.int32, device=device) // group


def read_order(groups: torch.Tensor, group: int, name: str) -> torch.Tensor:
    """groups: [inputs] as a file has them, where -1 for each says that they are in order, as in vLLM. The group of each
    input. Raises ConfigError unless groups are of that size."""
    expected = groups_in_order(len(groups), group, groups.device).to(groups.dtype)
    if bool((groups == -1).all()):
        return expected
    if not torch.equal(groups.sort().values, expected):
        raise ConfigError(f"{name}: its inputs are not in groups of {group}, as quantization_config says")
    return groups


def _of_groups(tensor: _Tensor, groups: Int4Groups, of: Int4Slice, target: torch.Tensor, offset: int) -> WeightPart:
    stored = of.inputs.cut(groups.stored)
    count = target.shape[-2]
    parts = groups.stored // groups.group if stored.size > 1 else 1
    skipped = of.inputs.start % groups.stored // groups.group if stored.size > 1 else 0

    def finish(values: torch.Tensor) -> torch.Tensor:
        here = values.repeat_interleave(parts, -1)[..., skipped:][..., :count]
        return F.pad(here, (0, count - here.shape[-1])).transpose(-1, -2) + offset

    return _part(tensor, of, stored, target, finish)


def _part(
    tensor: _Tensor, of: Int4Slice, inputs: Axis, target: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor]
) -> WeightPart:
    """finish: [(experts,) outputs, inputs] -> what the target receives."""
    stored = {"outputs": of.outputs, "inputs": inputs}
    skipped = {"outputs": 0, "inputs": 0}
    if tensor.packed is not None:
        if tensor.packed == "outputs" and of.outputs.size % IN_WORD:
            raise ConfigError(
                f"{of.name} has {of.outputs.size} outputs; allowed with 4-bit weights of this checkpoint: "
                f"multiples of {IN_WORD}"
            )
        skipped[tensor.packed] = stored[tensor.packed].start % IN_WORD
        stored[tensor.packed] = stored[tensor.packed].cut(IN_WORD)
    names = ("outputs", "inputs") if tensor.outputs_first else ("inputs", "outputs")
    experts = () if of.experts is None else (of.experts,)
    split = "inputs" if of.inputs.is_split else "outputs"

    def convert(values: torch.Tensor) -> torch.Tensor:
        if not tensor.outputs_first:
            values = values.transpose(-1, -2)
        if tensor.packed is not None:
            axis = -2 if tensor.packed == "outputs" else -1
            start, length = skipped[tensor.packed], {"outputs": of.outputs, "inputs": inputs}[tensor.packed].local
            values = (_unpack_outputs if axis == -2 else _unpack_inputs)(values, tensor.order)
            values = values.narrow(axis, start, length)
        if of.row_order is not None:
            order = torch.tensor(of.row_order, device=values.device)
            values = values.unflatten(-2, (-1, len(order))).index_select(-2, order).flatten(-3, -2)
        return finish(values)

    return WeightPart(
        name=f"{of.name}.{tensor.suffix}",
        shape=(*experts, *(stored[name].size for name in names)),
        target=target,
        dim=len(experts) + names.index(split),
        start=stored[split].start,
        length=stored[split].local,
        experts=bool(experts),
        output_axis=len(experts) + names.index("outputs"),
        convert=convert,
        dtypes=PLAIN_DTYPES if tensor.packed is None else (torch.int32,),
    )


def _unpack_outputs(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [..., outputs / 8, inputs] -> uint8 [..., outputs, inputs]."""
    numbers = torch.empty((*words.shape[:-1], IN_WORD, words.shape[-1]), dtype=torch.uint8, device=words.device)
    rows, unpacked = words.flatten(0, -2), numbers.view(-1, *numbers.shape[-2:])
    for part in rows_at_once(rows):
        here = rows[part].contiguous()
        for place, output in enumerate(order):
            unpacked[part, output].copy_(here >> 4 * place & 15)
    return numbers.flatten(-3, -2)


def _unpack_inputs(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [..., outputs, inputs / 8] -> uint8 [..., outputs, inputs]."""
    assert order == _IN_ORDER, "the one in which formats pack inputs"
    numbers = torch.empty((*words.shape[:-1], IN_WORD * words.shape[-1]), dtype=torch.uint8, device=words.device)
    rows, unpacked = words.flatten(0, -2), numbers.view(-1, numbers.shape[-1]).view(torch.int16)
    for part in rows_at_once(rows):
        octets = rows[part].contiguous().view(torch.uint8).to(torch.int16)
        unpacked[part] = (octets | octets << 4).bitwise_and_(0x0F0F)
    return numbers
