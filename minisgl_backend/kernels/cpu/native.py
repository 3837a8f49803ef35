"""Weights as the functions of `quantized.cpp` take them: the fields of its structs, by format."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import torch

from minisgl_backend.kernels.cpu.ops import HALF
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.moe.mxfp4.weight import BLOCK, Mxfp4Weight

_FP8, _INT8, _INT4, _MXFP4 = 2, 3, 4, 5  # kinds; those of plain weights are in HALF
_SCALE_BITS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 32, torch.bfloat16: 16, torch.float16: 15})
_REMEMBERED = 65536  # weights, of which a model has some thousands


class NativeWeight(ctypes.Structure):
    """`Weight` of formats.h, which says what the fields are."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("scale_bits", ctypes.c_int32),
        ("numbers", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("scales_of_row", ctypes.c_int64),
        ("expert_numbers", ctypes.c_int64),
        ("expert_scales", ctypes.c_int64),
        ("expert_zeros", ctypes.c_int64),
        ("plane", ctypes.c_int64),
        ("x_scale", ctypes.c_float),
    )


class NativeMixture(ctypes.Structure):
    """`Mixture` of quantized.cpp."""

    _fields_ = (
        ("gate_up", ctypes.POINTER(NativeWeight)),
        ("down", ctypes.POINTER(NativeWeight)),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias", "ids", "weights", "residual")),
        *((name, ctypes.c_int64) for name in ("experts", "tokens", "picked", "inner")),
        ("activation", ctypes.c_int32),
        ("turns", ctypes.c_int32),
    )


def native_weight(weight: torch.Tensor | Fp8Weight | Int8Weight | Int4Weight | Mxfp4Weight) -> NativeWeight:
    """Of one weight, or of all experts of a layer. It is valid as long as the weight's memory."""
    if isinstance(weight, torch.Tensor):
        return _plain(HALF[weight.dtype], weight.data_ptr(), tuple(weight.shape[-2:]))
    if isinstance(weight, Int4Weight):
        return _int4(weight)
    if isinstance(weight, Mxfp4Weight):
        return _mxfp4(weight.numbers.data_ptr(), weight.scales.data_ptr(), tuple(weight.numbers.shape[-3:-1]))
    scales = weight.scale.data_ptr()
    shape = tuple(weight.numbers.shape[-2:])
    if isinstance(weight, Int8Weight):
        return _int8(weight.numbers.data_ptr(), scales, shape)
    x_scale = 0.0 if weight.x_scale is None else float(weight.x_scale)
    return _fp8(weight.numbers.data_ptr(), scales, shape, weight.block, x_scale)


@lru_cache(maxsize=_REMEMBERED)
def _plain(kind: int, numbers: int, shape: tuple[int, int]) -> NativeWeight:
    rows, size = shape
    return NativeWeight(
        kind=kind, numbers=numbers, size=size, rows=rows, row_bytes=2 * size, expert_numbers=2 * rows * size
    )


@lru_cache(maxsize=_REMEMBERED)
def _fp8(
    numbers: int, scales: int, shape: tuple[int, int], block: tuple[int, int] | None, x_scale: float
) -> NativeWeight:
    rows, size = shape
    block_rows, block_size = block or (1, size)
    blocks = -(-size // block_size)
    return NativeWeight(
        kind=_FP8, numbers=numbers, scales=scales, size=size, rows=rows, row_bytes=size, block_rows=block_rows,
        block_size=block_size, scales_of_row=blocks, expert_numbers=rows * size,
        expert_scales=4 * blocks * -(-rows // block_rows), x_scale=x_scale,
    )  # fmt: skip


@lru_cache(maxsize=_REMEMBERED)
def _int8(numbers: int, scales: int, shape: tuple[int, int]) -> NativeWeight:
    rows, size = shape
    return NativeWeight(
        kind=_INT8, numbers=numbers, scales=scales, size=size, rows=rows, row_bytes=size, expert_numbers=rows * size,
        expert_scales=4 * rows,
    )  # fmt: skip


def _int4(weight: Int4Weight) -> NativeWeight:
    zeros = None if weight.zeros is None else weight.zeros.data_ptr()
    shape = (weight.size_out, weight.size_in, weight.padded)
    return _int4_of(
        weight.words.data_ptr(), weight.scales.data_ptr(), zeros, shape, weight.group, weight.plane, weight.scales.dtype
    )


@lru_cache(maxsize=_REMEMBERED)
def _int4_of(
    words: int, scales: int, zeros: int | None, shape: tuple[int, int, int], group: int, plane: int,
    dtype: torch.dtype,
) -> NativeWeight:  # fmt: skip
    rows, size, padded = shape
    of_expert = -(-padded // group) * rows
    return NativeWeight(
        kind=_INT4, scale_bits=_SCALE_BITS[dtype], numbers=words, scales=scales, zeros=zeros, size=size, rows=rows,
        row_bytes=padded // 2, block_size=group, plane=plane, expert_numbers=rows * padded // 2,
        expert_scales=dtype.itemsize * of_expert, expert_zeros=of_expert,
    )  # fmt: skip


@lru_cache(maxsize=_REMEMBERED)
def _mxfp4(numbers: int, scales: int, shape: tuple[int, int]) -> NativeWeight:
    rows, blocks = shape
    return NativeWeight(
        kind=_MXFP4, numbers=numbers, scales=scales, size=blocks * BLOCK, rows=rows, row_bytes=blocks * BLOCK // 2,
        scales_of_row=blocks, expert_numbers=rows * blocks * BLOCK // 2, expert_scales=rows * blocks,
    )  # fmt: skip
