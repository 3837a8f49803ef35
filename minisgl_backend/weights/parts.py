"""What layers need of a checkpoint: the part of each tensor that this rank has, and the parameter that it fills."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from minisgl_backend.number_formats import GGUF_BLOCKS

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class StoredRows:
    """Rows of a matrix as they lie in a file, in blocks."""

    type: str  # of GGUF_BLOCKS
    data: torch.Tensor  # uint8 [rows, bytes], mapped where it can be; rows may be apart


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """`target` receives `tensor.narrow(dim, start, target.shape[dim])`, plus `add`.

    With a `row_order` its rows are taken in groups of as many, each of them in that order. A `quantize` makes of what
    was read what `target` and `scale` receive; with `whole` that is all along `dim`, of which it keeps this rank's.
    Where a format stores a tensor in its own way, the part says so: `output_axis`, `dtypes`, `length` and `convert`.
    """

    name: str  # this project's, in full: see weights.names
    shape: tuple[int, ...]  # of the whole tensor, before it is split over ranks; () and (1,) are the same in files
    target: torch.Tensor  # a parameter or a view of one, to which what was read is broadcast
    dim: int = 0
    start: int = 0  # along `dim`, of the tensor in the file
    length: int | None = None  # likewise; None: as much as the target has there
    add: float = 0.0
    row_order: tuple[int, ...] | None = None
    experts: bool = False  # the first axis counts experts
    # Along which outputs of tensors that are stored together follow one another; "first": the first one, behind that of
    # the experts. None: they have the tensor in common, as they have a scale of all or the order of their inputs.
    output_axis: int | Literal["first"] | None = "first"
    dtypes: tuple[torch.dtype, ...] = PLAIN_DTYPES  # that it may have in the file
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None  # what was read -> what the target receives
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    scale: torch.Tensor | None = None
    whole: bool = False
    # Receives the part in place of `target`, which is then on no device: as it lies in the file, where that has it in
    # rows of GGUF_BLOCKS, else its numbers.
    keep: Callable[..., None] | None = None  # StoredRows or a tensor, and of experts each one's number, as `expert`
    keep_types: Collection[str] = tuple(GGUF_BLOCKS)  # of blocks that it takes so
    optional: bool = False  # where the file has no such tensor, the target keeps what it has

    @property
    def is_scalar(self) -> bool:
        """Whether the tensor has one number, which files store with one axis or with none."""
        return self.shape in ((), (1,))

    @property
    def read_range(self) -> tuple[int, int]:
        """Of the tensor, along `dim`."""
        if self.whole:
            return 0, self.shape[self.dim]
        return self.start, self.start + (self.target.shape[self.dim] if self.length is None else self.length)

    def fill(self, values: torch.Tensor) -> None:
        """values: what was read, in rows' own order. `copy_` converts number formats."""
        values = self.ordered(values)
        if self.keep is not None:
            self.keep(values)
            return
        if self.convert is not None:
            values = self.convert(values)
        if self.quantize is not None:
            values, scale = self.quantize(values)
            assert self.scale is not None, "it comes with `quantize`"
            self.scale.copy_(scale)
        self.target.copy_(values)
        if self.add:
            self.target.add_(self.add)

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """By `row_order`."""
        if self.row_order is None:
            return rows
        order = torch.tensor(self.row_order, device=rows.device)
        return rows.unflatten(0, (-1, len(order))).index_select(1, order).flatten(0, 1)

    def expert(self, index: int) -> WeightPart:
        """The part of one expert."""
        return replace(
            self,
            shape=self.shape[1:],
            target=self.target[index],
            dim=self.dim - 1,
            experts=False,
            scale=None if self.scale is None else self.scale[index],
            keep=None if self.keep is None else partial(self.keep, expert=index),
            output_axis=self.output_axis - 1 if isinstance(self.output_axis, int) else self.output_axis,
        )


def check_filled(parts: Iterable[WeightPart], parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError unless the parts fill every element of every parameter exactly once."""
    blocks: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        for target in (part.target, part.scale):
            if target is not None:
                blocks.setdefault(target.untyped_storage().data_ptr(), []).extend(_blocks(target))
    for name, parameter in parameters:
        end = 0
        for start, stop in sorted(blocks.get(parameter.untyped_storage().data_ptr(), [])):
            if start != end:
                kind = "filled twice" if start < end else "not filled"
                raise ValueError(f"{name}: elements {min(start, end)} to {max(start, end)} are {kind}")
            end = stop
        if end != parameter.numel():
            raise ValueError(f"{name}: elements {end} to {parameter.numel()} are not filled")


def _blocks(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Where in its storage a view lies: first element and the one after the last of each contiguous stretch."""
    size, dims = 1, view.dim()
    while dims and view.stride(dims - 1) == size:
        size *= view.shape[dims - 1]
        dims -= 1
    for index in itertools.product(*(range(length) for length in view.shape[:dims])):
        start = int(view.storage_offset()) + sum(i * int(view.stride(axis)) for axis, i in enumerate(index))
        yield start, start + size
