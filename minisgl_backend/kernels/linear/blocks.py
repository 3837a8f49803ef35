"""Weights in GGUF's blocks as kernels take them: outputs below one another, of which each tensor may have its type."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minisgl_backend.kernels.linear.call import WeightKind

GROUP = 32  # numbers that share a scale in the smallest blocks; of activations, too
BFLOAT16 = 30  # as ggml counts types
_FIELDS = 4  # of struct Weight in kernels/cpu/blocks.cpp


@dataclass(frozen=True)
class BlockRows:
    """Outputs in one type. data: uint8 [outputs, bytes of a row], rows may be apart; or numbers [outputs, inputs]."""

    type: int | None  # ggml's number; None: plain
    data: torch.Tensor

    def rows(self, start: int, count: int) -> BlockRows:
        return BlockRows(self.type, self.data[start : start + count])


class BlockWeight:
    """[outputs, inputs], filled once it is loaded."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.pieces: tuple[BlockRows, ...] = ()
        self.table = (ctypes.c_long * 0)()  # of struct Weight

    def fill(self, pieces: Sequence[BlockRows]) -> None:
        # Memory is held by the pieces; the table has its addresses.
        self.pieces = tuple(pieces)
        fields = [
            number
            for type_, data in ((one.type, one.data) for one in self.pieces)
            for number in (
                BFLOAT16 if type_ is None else type_, data.data_ptr(), len(data), data.stride(0) * data.itemsize,
            )
        ]  # fmt: skip
        self.table = (ctypes.c_long * len(fields))(*fields)

    def apart(self) -> list[BlockWeight]:
        """Each piece by itself."""
        weights = [BlockWeight((len(one.data), self.shape[1])) for one in self.pieces]
        for weight, piece in zip(weights, self.pieces, strict=True):
            weight.fill([piece])
        return weights

    @property
    def kind(self) -> WeightKind:
        return WeightKind(*self.shape, sum(one.data.nbytes for one in self.pieces))
