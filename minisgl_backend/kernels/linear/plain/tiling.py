"""Tilings of small_rows.py's kernels by the sizes of a GEMM. Needs no Triton, so that it works on any machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from minisgl_backend.kernels.launch import next_power_of_2
from minisgl_backend.kernels.shared_memory import LARGEST, stages_that_fit

MAX_ROWS = 64
MAX_VECTOR_ROWS = 2
MAX_SLICED_ROWS = 8
MAX_SLICED_IN = 1024


@dataclass(frozen=True)
class LinearShape:
    """Tiling of one GEMM.

    `vector` selects the kernel without tensor cores; slices > 1, each of tile_in inputs, the kernel without a loop, for
    up to slices * tile_in * split inputs.
    """

    tile_out: int
    tile_in: int
    split: int
    num_warps: int
    num_stages: int
    vector: bool = False
    slices: int = 1
    # `_linear_kernel`: tiles of weights that a program loads before it waits. They stay in registers or shared memory
    # until the other tiles are done.
    early: int = 0


@cache
def linear_shape(
    rows: int, size_out: int, size_in: int, gated: bool = False, num_sms: int = 132, shared: int = LARGEST
) -> LinearShape:
    """The tiling that was measured best on an H200 inside a whole decode step, where the resources that a kernel leaves
    free count as much as its own time, since the next kernel's first weights are loaded into them. See
    benchmarks/kernels. `shared`: bytes of shared memory that a program may have."""
    shape = _measured_shape(rows, size_out, size_in, gated, num_sms)
    if shape.vector or shape.slices > 1:
        return shape
    tile_rows = shape.tile_out * (2 if gated else 1) + max(16, next_power_of_2(rows))  # of the weight and of x
    num_stages = stages_that_fit(shape.num_stages, 2 * shape.tile_in * tile_rows, shared)
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
        # Half of the multiprocessors do not take all of the bandwidth (4096 x 4096, 8 rows: 15.0 -> 12.7 us).
        split = 2 if rows <= 16 and 2 * -(-size_out // 64) <= num_sms and size_in >= 4096 else 1
        return LinearShape(64, 256 if rows <= 16 else 128, split, 4, 3 if size_in <= 1024 else 5)
    tile_in = 128
    if size_out >= 2048 and size_in >= 4096:
        # 128 programs for 2,048 outputs: each has enough weights in flight, and there are few parts to add.
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
    """Tiling of a GEMM of 3 to 16 rows by `_linear_kernel` with at least as many inputs as outputs, after a kernel that
    leaves memory idle, as an all-reduce does: measured inside a chain with all-reduces.

    Two programs on each multiprocessor with LARGEST shared memory; weights are loaded before the sum arrives.
    """
    split = max(1, min(8, 2 * num_sms // -(-size_out // 64)))
    if size_in >= 8192:
        return LinearShape(64, 64, split, 4, 5, early=4)
    return LinearShape(64, 128, split, 4, 3, early=2)


def is_sliced(rows: int, size_in: int) -> bool:
    """Whether the kernel without a loop was measured to be faster for wide or gated GEMMs."""
    return 1 < rows <= MAX_SLICED_ROWS and size_in <= MAX_SLICED_IN


def _sliced_shape(rows: int, size_out: int, size_in: int, gated: bool) -> LinearShape | None:
    """Tiling of the kernel without a loop, where it was measured to be faster; else None."""
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
            return LinearShape(4, 1024, 1, 4, 1, vector=True)  # many programs: each needs fewer weights in flight
        return LinearShape(2, 2048, 1, 4, 1, vector=True)
    if gated or tile_in > 4096:
        return LinearShape(2, 2048, 1, 4, 1, vector=True)
    # All of an output's weights in registers: they are loaded before the kernel waits for the previous one.
    return LinearShape(4 if tile_in == 2048 else 2, tile_in, 1, 8, 1, vector=True)
