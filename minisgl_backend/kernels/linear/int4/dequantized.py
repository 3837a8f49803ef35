"""GEMMs of many rows with 4-bit weights: parts of the weight are dequantized, and cuBLAS multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.epilogue import apply_epilogue
from minisgl_backend.kernels.linear.int4 import few_rows
from minisgl_backend.kernels.linear.int4.planes import packed_scale, packed_zero, planes
from minisgl_backend.kernels.linear.int4.reference import MIDDLE, PLANES, Int4Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice, QuantizedWeight

_TILE_OUT = 32
Weight = TypeVar("Weight", bound=QuantizedWeight)


def run(device: GemmDevice, x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
    if call.norm_weight is not None:
        x = device.ops.rms_norm(x, call.norm_weight, call.eps)
    return apply_epilogue(device, by_parts(x, weight, dequantize_rows, device.scratch), call)


def run_repacked(kernel: str, device: GemmDevice, x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
    """By a library's kernel, of the weight in its layout."""
    if call.norm_weight is not None:
        x = device.ops.rms_norm(x, call.norm_weight, call.eps)
    if weight.repacked is None:
        raise ValueError(f"the weight is not held in the layout of {kernel}")
    return apply_epilogue(device, weight.repacked.linear(x, kernel), call)


def by_parts(
    x: torch.Tensor,
    weight: Weight,
    dequantize: Callable[[Weight, slice, torch.Tensor], torch.Tensor],
    scratch: torch.Tensor,
) -> torch.Tensor:
    """x @ weight.T, dequantizing as many outputs at a time as fit into `scratch`, uint8. dequantize: of outputs, into
    a tensor [outputs, size_in]."""
    (rows, size_in), size_out = x.shape, weight.kind.size_out
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    step = max(_TILE_OUT, len(scratch) // (x.element_size() * size_in) // _TILE_OUT * _TILE_OUT)
    for start in range(0, size_out, step):
        part = slice(start, min(start + step, size_out))
        count, size = part.stop - start, (part.stop - start) * size_in * x.element_size()
        fits = size <= len(scratch)
        numbers = scratch[:size].view(x.dtype).view(count, size_in) if fits else x.new_empty((count, size_in))
        torch.mm(x, dequantize(weight, part, numbers).t(), out=out[:, part])
    return out


def dequantize_rows(weight: Int4Weight, rows: slice, out: torch.Tensor) -> torch.Tensor:
    """out [outputs of `rows`, size_in]."""
    count, block = rows.stop - rows.start, PLANES * weight.plane
    _dequantize_kernel[(weight.padded // block, cdiv(count, _TILE_OUT))](
        weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros, out, rows.start, rows.stop,
        WIDTH=weight.size_out, SIZE_IN=weight.size_in, WORDS=weight.words.shape[-1], GROUP=weight.group,
        PLANE=weight.plane, TOGETHER=few_rows.planes_together(weight), TILE_OUT=_TILE_OUT,
        ZEROS=weight.zeros is not None, MIDDLE=MIDDLE, ASM=few_rows.uses_assembly(out), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "stop"])
def _dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, start, stop,
    WIDTH: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr,
    TOGETHER: tl.constexpr, TILE_OUT: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Outputs from `start` to `stop`, one block of inputs per program."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = start + tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    ok = row < stop
    at = tl.program_id(0) * PLANE
    c = tl.arange(0, PLANE)
    word_rows = words_ptr + row.to(tl.int64)[:, None] * WORDS
    words, odd = few_rows.words_of(word_rows, c[None, :], ok[:, None], at, ASM)
    scales = few_rows.scales_of(scales_ptr, zeros_ptr, row, ok, at, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
    c_tile = tl.broadcast_to(c[None, :], words.shape)
    out_rows = out_ptr + (row - start).to(tl.int64)[:, None] * SIZE_IN
    for chunk in tl.static_range(8 // TOGETHER):
        scale = tl.broadcast_to(packed_scale(scales[chunk][0], ASM)[:, None], words.shape)
        if ZEROS:
            zero = tl.broadcast_to(packed_zero(scales[chunk][1], DTYPE, ASM)[:, None], words.shape)
        else:
            zero = packed_zero(tl.full(words.shape, MIDDLE, tl.int32), DTYPE, ASM)
        weights = planes(words, odd, c_tile, zero, scale, DTYPE, True, ASM)
        for plane in tl.static_range(chunk * TOGETHER, (chunk + 1) * TOGETHER):
            i = at * 8 + plane * PLANE + c
            tl.store(out_rows + i[None, :], weights[plane], mask=ok[:, None] & (i < SIZE_IN)[None, :])
