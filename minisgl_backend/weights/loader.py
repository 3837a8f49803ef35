"""Streams the tensors of a checkpoint, part by part, from the files to the parameters on the device.

A tensor-parallel rank reads only its own slices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.process.progress import Progress
from minisgl_backend.weights.files import Readable
from minisgl_backend.weights.names import Stored, TensorNames
from minisgl_backend.weights.parts import StoredRows, WeightPart
from minisgl_backend.weights.shards import hint_at_prefix, some

log = logging.getLogger(__name__)


class Outputs(NamedTuple):
    """Those of one part, where several take turns: of each run of `period` outputs `taken`, from `first` on."""

    period: int
    first: int
    taken: int

    def of(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """values: whole runs along `axis`."""
        runs = values.unflatten(axis, (-1, self.period))
        return runs.narrow(axis + 1, self.first, self.taken).flatten(axis, axis + 1)


@dataclass(frozen=True, kw_only=True)
class Read:
    """One part of one tensor of the checkpoint."""

    part: WeightPart
    index: tuple[slice | int, ...]  # of the tensor in the file
    transposed: bool = False
    outputs: Outputs | None = None  # of what was read, along the outputs: those that belong to the part
    axis: int = 0  # of the outputs, as the part has them

    def turned(self) -> Read:
        """The same of a tensor whose last two axes are the other way round."""
        return replace(self, index=_turned(self.index), transposed=not self.transposed)

    def keep(self, source: Any) -> bool:
        """Gives the part what the file has of it, as it lies there; False: it has no such rows, or cuts them."""
        take = None if self.transposed else self.part.keep
        rows = None if take is None else source.stored_rows(self.index)
        if take is None or rows is None or rows.type not in self.part.keep_types:
            return False
        data = rows.data if self.outputs is None else self.outputs.of(rows.data, 0)
        take(StoredRows(rows.type, self.part.ordered(data)))
        return True

    def fill(self, values: torch.Tensor) -> None:
        """Copies what was read by `index` to the part's target, which may convert it."""
        if self.transposed:
            values = values.transpose(-1, -2)
        if self.outputs is not None:
            values = self.outputs.of(values, self.axis)
        self.part.fill(values.reshape(self.part.shape) if self.part.is_scalar else values)


@dataclass(frozen=True)
class TensorReads:
    """All that is read of one tensor."""

    shape: tuple[int, ...]
    reads: list[Read] = field(default_factory=list)
    either_way: bool = False  # its last two axes may be the other way round

    @property
    def is_optional(self) -> bool:
        return all(read.part.optional for read in self.reads)

    @property
    def target_bytes(self) -> int:
        return sum(read.part.target.nbytes for read in self.reads)

    def for_shape(self, found: tuple[int, ...]) -> TensorReads | None:
        """What is read of a tensor with this shape; None: it cannot have it."""
        if found == self.shape or {found, self.shape} <= {(), (1,)}:
            return self
        if self.either_way and found == _turned(self.shape):
            return TensorReads(found, [read.turned() for read in self.reads])
        return None


def _turned(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*axes[:-2], axes[-1], axes[-2])


def plan_reads(
    parts: Sequence[WeightPart], names: TensorNames, found: Container[str] | None = None
) -> dict[str, TensorReads]:
    """By name in the checkpoint, with this project's prefix: what is read of each tensor, and the shape that it must
    have. Together the parts of a tensor, of all ranks, are the whole tensor. found: see `TensorNames.find`."""
    shapes = {part.name: part.shape for part in parts}
    plan: dict[str, TensorReads] = {}
    for part in parts:
        other = names.find(part.name, found)
        if other is None:
            stored, layer, suffix = Stored(name=part.name, of=(part.name,)), "", ""
        else:
            stored, layer, suffix = other
        outputs = [shapes[f"{layer}{one}{suffix}"] for one in stored.of]
        name = f"{layer}{stored.name}{suffix}"
        position = stored.of.index(part.name[len(layer) : len(part.name) - len(suffix)])
        if part.experts and "{expert}" in name:
            for expert in range(part.shape[0]):
                _add(plan, name.format(expert=expert), part.expert(expert), stored, position, [s[1:] for s in outputs])
        else:
            _add(plan, name, part, stored, position, outputs)
    return plan


def _add(
    plan: dict[str, TensorReads],
    name: str,
    part: WeightPart,
    stored: Stored,
    position: int,
    shapes: list[tuple[int, ...]],
) -> None:
    """`position`: of the part's tensor among those that are stored together, whose shapes are `shapes`."""
    if part.is_scalar:
        _append(plan, name, TensorReads(part.shape), Read(part=part, index=()))
        return
    axis = (1 if part.experts else 0) if part.output_axis == "first" else part.output_axis
    ranges = [(0, length) for length in part.shape]
    ranges[part.dim] = part.read_range
    whole, outputs = list(part.shape), None
    if axis is not None:
        whole[axis] = sum(shape[axis] for shape in shapes)
    start, stop = ranges[axis or 0]
    if axis is None:
        pass
    elif stored.interleaved or stored.groups > 1:
        counts = [1 if stored.interleaved else shape[axis] // stored.groups for shape in shapes]
        if not counts[position]:
            raise ConfigError(
                f"{name} has {shapes[position][axis]} values for {part.name} in {stored.groups} groups; allowed: one "
                "or more in each"
            )
        outputs = Outputs(sum(counts), sum(counts[:position]), counts[position])
        ranges[axis] = (start // outputs.taken * outputs.period, stop // outputs.taken * outputs.period)
    else:
        before = sum(shape[axis] for shape in shapes[:position])
        ranges[axis] = (before + start, before + stop)
    transposed = stored.transposed and part.output_axis == "first" and len(whole) - (axis or 0) == 2
    if transposed:
        whole[-1], whole[-2] = whole[-2], whole[-1]
        ranges[-1], ranges[-2] = ranges[-2], ranges[-1]
    index: tuple[slice | int, ...] = tuple(slice(*r) for r in ranges)
    if stored.one_row:
        whole, index = [1, *whole], (0, *index)
    read = Read(part=part, index=index, transposed=transposed, outputs=outputs, axis=axis or 0)
    _append(plan, name, TensorReads(tuple(whole), either_way=stored.either_way), read)


def _append(plan: dict[str, TensorReads], name: str, empty: TensorReads, read: Read) -> None:
    tensor = plan.setdefault(name, empty)
    if tensor.shape != empty.shape:
        raise ValueError(f"{name}: two parts of it make it {tensor.shape} and {empty.shape}")
    tensor.reads.append(read)


def load_weights(
    parts: Sequence[WeightPart],
    names: TensorNames,
    checkpoint: Readable,
    device: torch.device,
    on_progress: Progress,
    *,
    model: str,
    is_redundant: Callable[[str], bool],
) -> None:
    """Fills all targets. Raises ConfigError naming tensors that are missing, unexpected or of another shape.

    `on_progress` gets (bytes read so far, bytes to read), of this rank, after every tensor. `model`: its name in
    messages. `is_redundant`: whether a tensor with this name may be there and says nothing new.
    """
    found = {name for name in checkpoint.names() if name.startswith(names.within)}
    plan = plan_reads(parts, names, found)
    plan = {name: tensor for name, tensor in plan.items() if name in found or not tensor.is_optional}
    _check_names(plan, found, model, names.left_out, is_redundant)
    total = sum(tensor.target_bytes for tensor in plan.values())
    done = 0
    for name, source in checkpoint.slices(plan, device):
        tensor, path = plan[name], checkpoint.path(name)
        shape = tuple(source.get_shape())
        stored = tensor.for_shape(shape)
        if stored is None:
            raise ConfigError(f"{path}: {name} has shape {shape}; config.json makes it {tensor.shape}")
        _fill(name, stored.reads, source, path)
        done += tensor.target_bytes
        on_progress(done, total)


def _fill(name: str, reads: Iterable[Read], source: Any, path: Path) -> None:
    index: tuple[slice | int, ...] | None = None
    for read in reads:
        if read.keep(source):
            continue
        if index is None or index != read.index:  # interleaved parts have one index
            index = read.index
            values = source[index]  # in the file's number format; `copy_` converts it
        if values.dtype not in read.part.dtypes:
            found, *allowed = (str(one).removeprefix("torch.") for one in (values.dtype, *read.part.dtypes))
            raise ConfigError(
                f"{path}: {name} has the number format {found}; allowed by config.json's quantization_config, or "
                f"without one: {', '.join(allowed)}. Quantized embeddings, LM heads and routers are not served"
            )
        read.fill(values)


def _check_names(
    plan: dict[str, TensorReads],
    found: set[str],
    model: str,
    left_out: tuple[str, ...],
    is_redundant: Callable[[str], bool],
) -> None:
    missing = sorted(set(plan) - found)
    if missing:
        hint = hint_at_prefix(missing, found - set(plan))
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tensors that config.json asks for: {some(missing)}{hint}"
        )
    others = found - set(plan)
    skipped = sorted(name for name in others if name.startswith(left_out)) if left_out else []
    if skipped:
        log.warning("%d tensors of the checkpoint are of no use for text and left out: %s", len(skipped), some(skipped))
    unexpected = sorted(name for name in others.difference(skipped) if not is_redundant(name))
    if unexpected:
        raise ConfigError(
            f"the checkpoint has {len(unexpected)} tensors that {model} with this config.json does "
            f"not have: {some(unexpected)}"
        )
