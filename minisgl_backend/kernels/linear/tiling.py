"""How small_rows.py's kernels cut a GEMM into programs, by its sizes: needs no Triton, so that it can be asked
anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from minisgl_backend.kernels.shared_memory import LARGEST, stages_that_fit

MAX_ROWS = 64
MAX_VECTOR_ROWS = 2
MAX_SLICED_ROWS = 8
MAX_SLICED_IN = 1024


@dataclass(frozen=True)
class LinearShape:
    """How one GEMM is cut into programs.

    `vector` chooses the kernel without tensor cores; more than one of `slices`, each of tile_in inputs, the one without
    a loop, for inputs of up to slices * tile_in * split.
    """

    tile_out: int
    tile_in: int
    split: int
    num_warps: int
    num_stages: int
    vector: bool = False
    slices: int = 1
    # Of `_linear_kernel`: tiles of a program's weights that it loads before it waits. They stay in registers or shared
    # memory until the others are done.
    early: int = 0


@cache
def linear_shape(
    rows: int, size_out: int, size_in: int, gated: bool = False, num_sms: int = 132, shared: int = LARGEST
) -> LinearShape:
    """The cut that was measured best on an H200, inside a whole decode step: what a kernel leaves free of a
    multiprocessor counts as much as its own time, since the next one's first weights are on their way there. See
    benchmarks/kernels. `shared`: bytes of shared memory that a program may have."""
    shape = _measured_shape(rows, size_out, size_in, gated, num_sms)
    if shape.vector or shape.slices > 1:
        return shape
    lines = shape.tile_out * (2 if gated else 1) + max(16, next_power_of_2(rows))
    num_stages = stages_that_fit(shape.num_stages, 2 * shape.tile_in * lines, shared)
    return shape if num_stages == shape.num_stages else replace(shape, num_stages=num_stages)


def _measured_shape(rows: int, size_out: int, size_in: int, gated: bool, num_sms: int) -> LinearShape:
    sliced = _sliced_shape(rows, size_out, size_in, gated)
    if sliced is not None:
        return sliced
    if rows <= MAX_VECTOR_ROWS:
        return _vector_shape(rows, size_out, size_in, gated)
    if gated and size_out >= 4096 and rows > 32:
        return LinearShape(128, 64, 1, 8, 4)
    if gated and size_out >= 4096:
        # Several programs on each multiprocessor, instead of more or larger stages in one.
        return LinearShape(64, 64, 1, 4, 4 if rows <= 16 else 3)
    if size_out >= 4096:
        return LinearShape(64, 256 if rows <= 16 else 128, 1, 4, 3 if size_in <= 1024 else 5)
    tile_in = 128
    if size_out >= 2048 and size_in >= 4096:
        # 128 programs for 2,048 outputs: each has enough weights on their way, and there are few parts to add.
        split = 1
        while size_out // 64 * split * 4 < num_sms * 3 and split < 8 and size_in // (split * 2) >= tile_in:
            split *= 2
        return LinearShape(64, tile_in, split, 4, 4)
    tile_out = 32
    split, programs = 1, -(-size_out // tile_out)
    while programs * split < num_sms and split < 8 and size_in // (split * 2) >= tile_in:
        split *= 2
    return LinearShape(tile_out, tile_in, split, 4, 5)


def long_shape(size_out: int, size_in: int, num_sms: int = 132) -> LinearShape:
    """Of a GEMM of 3 to 16 rows by `_linear_kernel`, of at least as many inputs as outputs, in a chain of kernels in
    which memory is idle before it, as it is while ranks sum what they have: measured inside of such a chain.

    Two programs on each multiprocessor of LARGEST shared memory, and weights on their way before the sum is there.
    """
    split = max(1, min(8, 2 * num_sms // -(-size_out // 64)))
    if size_in >= 8192:
        return LinearShape(64, 64, split, 4, 5, early=4)
    return LinearShape(64, 128, split, 4, 3, early=2)


def is_sliced(rows: int, size_in: int) -> bool:
    """Whether the kernel without a loop was measured to be faster for wide or gated GEMMs."""
    return 1 < rows <= MAX_SLICED_ROWS and size_in <= MAX_SLICED_IN


def _sliced_shape(rows: int, size_out: int, size_in: int, gated: bool) -> LinearShape | None:
    """Of the kernel without a loop, where it was measured to be faster."""
    if is_sliced(rows, size_in) and gated:
        return LinearShape(16, 128, 1, 4, 1, slices=8)
    if is_sliced(rows, size_in) and size_out >= 4096:
        return LinearShape(32, 256, 1, 4, 1, slices=4)
    if gated or not 1 < rows <= MAX_SLICED_ROWS:
        return None
    if size_out <= 1024 and size_in <= 2048:
        return LinearShape(32, 256, 4, 2, 1, slices=2)
    if size_out <= 1024 and size_in <= 3072:
        return LinearShape(16, 256, 3, 4, 1, slices=4)  # larger tiles do not fit smaller GPUs
    if size_out >= 4096 and size_in <= 2048:  # Qwen3-30B-A3B's first GEMM, with the norm
        return LinearShape(64, 128, 4, 4, 1, slices=4)
    if size_out == 2048 and 2048 < size_in <= 4096:  # its second
        return LinearShape(32, 256, 4, 4, 1, slices=4)
    return None


def _vector_shape(rows: int, size_out: int, size_in: int, gated: bool) -> LinearShape:
    tile_in = next_power_of_2(size_in)
    if tile_in < 2048:
        if gated and rows == 1:
            return LinearShape(1, tile_in, 1, 1, 1, vector=True)
        return LinearShape(2 if gated else 4, tile_in, 1, 2, 1, vector=True)
    if rows == 1 and not gated and size_in == 4096 and size_out <= 2048:
        return LinearShape(4, 4096, 1, 8, 1, vector=True)
    if rows == 1 and not gated and (size_in % 4096 == 0 or size_in >= 8192):
        return LinearShape(2, 4096, 1, 4, 1, vector=True)  # fewer steps to wait for
    if rows == 1 and not gated and tile_in == 2048:
        if size_out >= 4096:
            return LinearShape(4, 1024, 1, 4, 1, vector=True)  # of many programs, each needs fewer weights on their way
        return LinearShape(2, 2048, 1, 4, 1, vector=True)
    if gated or tile_in > 4096:
        return LinearShape(2, 2048, 1, 4, 1, vector=True)
    # All of an output's weights in registers: they are on their way before the kernel waits for the one before it.
    return LinearShape(4 if tile_in == 2048 else 2, tile_in, 1, 8, 1, vector=True)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
