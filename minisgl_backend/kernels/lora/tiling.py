"""How adapters' factors are divided among programs; the same for any number of rows, so that sums are."""

from __future__ import annotations

import torch

from minisgl_backend.kernels.launch import cdiv

RANK_MULTIPLE = 16  # the least that a tensor core multiplies
TILE_ROWS = 16
FEW_ROWS = 64  # of a decode step, which has kernels of its own
MANY_ROWS = 512  # rows from which tiles are enough programs: one then adds up all parts of its rows
# Parts of the inputs, measured on an H200 in chains of a layer's GEMMs: with more there is more to be added up, with
# larger ones a program waits longer for its loads.
_PART_INPUTS, _MOST_PARTS = 512, 32
_ROW_PART, MOST_ROW_PARTS = 512, 32


def parts_of(size_in: int) -> tuple[int, int]:
    """Inputs of a part, and how many parts there are."""
    part = _PART_INPUTS * cdiv(size_in, _PART_INPUTS * _MOST_PARTS)
    return part, cdiv(size_in, part)


def row_part(size_in: int) -> int:
    """Inputs of a part where a program multiplies one row in registers, and MOST_ROW_PARTS are added at once."""
    part = _ROW_PART
    while size_in > part * MOST_ROW_PARTS:
        part *= 2
    return part


def rank_block(rank: int) -> int:
    """Ranks that a program multiplies at once."""
    return next(size for size in (64, 32, 16) if rank % size == 0)


def precision(x: torch.Tensor) -> str:
    """Of products with float32 numbers, where rows are x's."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
