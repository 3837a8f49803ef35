"""Quantizes activations to FP8, with the norm or the activation of a gated MLP inside: a scale per token, per group of
inputs, or a given one.

`pdl`: programmatic dependent launch, whose rules are in small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, LARGEST, LEAST, Fp8Weight

_WIDTH = 2048  # inputs of a program that only needs its own groups of a row (no norm)
_FEW_ROWS = 64  # up to this, a row of usual size is one load of its program; above it no lane is idle
_MULTIPLE = 16  # rows of what is quantized for a GEMM in blocks that is not known yet


@dataclass(frozen=True)
class QuantizedRows:
    """Rows in FP8, in place of a tensor [num_rows, size] that is multiplied with one weight."""

    numbers: torch.Tensor  # [num_rows or more, size]: what is more is undefined
    scales: torch.Tensor  # float32 [num_rows or more], or as of `quantize_groups`
    num_rows: int
    dtype: torch.dtype  # of the tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.numbers.shape[1]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def __len__(self) -> int:
        return self.num_rows

    def stride(self, dim: int) -> int:
        return self.numbers.stride(dim)

    def padded_to(self, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and scales, whose rows are a multiple of it, or just these if it is 1."""
        if multiple > 1 or len(self.numbers) == self.num_rows:
            return self.numbers, self.scales
        scales = self.scales[: self.num_rows]
        return self.numbers[: self.num_rows], scales.t().contiguous().t() if scales.dim() > 1 else scales


def quantize_for(
    weight: Fp8Weight, x: torch.Tensor | QuantizedRows, call: GemmCall, multiple: int = 1, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) and its scales as a GEMM with this weight takes them; multiple: see `quantize_groups`."""
    if isinstance(x, QuantizedRows):
        return x.padded_to(multiple)
    if weight.block is None:
        return quantize_tokens(x, call.norm_weight, call.eps, pdl, weight.x_scale)
    return quantize_groups(x, weight.block[1], call.norm_weight, call.eps, pdl, multiple)


def quantize_activated(gate_up: torch.Tensor, activation: str, weight: Fp8Weight, pdl: bool = False) -> QuantizedRows:
    """`activate_mul` of gate_up [num_rows, 2 * size], for a GEMM with `weight`: the numbers are those of both apart."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    options = {"ACTIVATION": activation, **pdl_options(pdl)}
    if weight.block is None:
        numbers = torch.empty((num_rows, size), dtype=FP8, device=gate_up.device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
        _launch_quantize(gate_up, None, weight.x_scale, numbers, scales, 0.0, options)
        return QuantizedRows(numbers, scales, num_rows, gate_up.dtype)
    group, rows = weight.block[1], cdiv(num_rows, _MULTIPLE) * _MULTIPLE
    numbers = torch.empty((rows, size), dtype=FP8, device=gate_up.device)
    scales = torch.empty((cdiv(size, group), rows), dtype=torch.float32, device=gate_up.device)
    width = max(min(_WIDTH, next_power_of_2(size)), group)
    _quantize_groups_kernel[(num_rows, cdiv(size, width))](
        gate_up, gate_up, numbers, scales, 0.0, gate_up.stride(0), rows, SIZE=size, WIDTH=width, GROUP=group,
        NORM=False, LARGEST=LARGEST, LEAST=LEAST, num_warps=max(1, width // 512), **options,
    )  # fmt: skip
    return QuantizedRows(numbers, scales.t(), num_rows, gate_up.dtype)


def quantize_tokens(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    x_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) [num_tokens, size] as FP8, and its float32 scales [num_tokens]. norm_weight [size]: RMSNorm first.

    x_scale: one scale for all tokens, instead of one from each token's largest number.
    """
    num_tokens, size = x.shape
    numbers = torch.empty((num_tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens > 0:
        options = {"ACTIVATION": None, **pdl_options(pdl)}
        _launch_quantize(x, norm_weight, x_scale, numbers, scales, eps, options)
    return numbers, scales


def _launch_quantize(
    x: torch.Tensor, norm_weight: torch.Tensor | None, x_scale: torch.Tensor | None, numbers: torch.Tensor,
    scales: torch.Tensor, eps: float, options: dict[str, Any],
) -> None:  # fmt: skip
    rows, size = numbers.shape
    width = next_power_of_2(size)
    num_warps = min(16, max(1, width // 512))
    if size > 8192 or (rows > _FEW_ROWS and size > 1024):
        num_warps = 4 if size <= 8192 else 16
        # 16 bytes of each thread at a time; of many rows that are long, 8, which leaves room for a program more.
        width = (128 if rows > _FEW_ROWS and size > 8192 else 256) * num_warps
    _quantize_kernel[(rows,)](
        x, norm_weight if norm_weight is not None else x, scales if x_scale is None else x_scale, numbers, scales,
        eps, x.stride(0), SIZE=size, WIDTH=width, NORM=norm_weight is not None, GIVEN=x_scale is not None,
        LARGEST=LARGEST, LEAST=LEAST, num_warps=num_warps, **options,
    )  # fmt: skip


def quantize_groups(
    x: torch.Tensor,
    group: int,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
    multiple: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) [num_tokens, size] as FP8, and its float32 scales [num_tokens, groups of `group` inputs], which are
    column-major, as tiles of a GEMM and libraries read them.

    Where num_tokens is not a multiple of `multiple`, both are padded with undefined rows.
    """
    num_tokens, size = x.shape
    rows = cdiv(num_tokens, multiple) * multiple
    numbers = torch.empty((rows, size), dtype=FP8, device=x.device)
    scales = torch.empty((cdiv(size, group), rows), dtype=torch.float32, device=x.device)
    width, with_norm = min(_WIDTH, next_power_of_2(size)), norm_weight is not None
    if with_norm and num_tokens <= _FEW_ROWS:
        width = next_power_of_2(size)
    elif with_norm and size % width:
        width = min(width, 1024)
    width = max(width, group)
    if num_tokens > 0:
        _quantize_groups_kernel[(num_tokens, 1 if with_norm else cdiv(size, width))](
            x, norm_weight if norm_weight is not None else x, numbers, scales, eps, x.stride(0), rows, SIZE=size,
            WIDTH=width, GROUP=group, ACTIVATION=None, NORM=with_norm, LARGEST=LARGEST, LEAST=LEAST,
            num_warps=min(16, max(1, width // 512)), **pdl_options(pdl),
        )  # fmt: skip
    return numbers, scales.t()


@triton.jit
def _quantize_kernel(
    x_ptr, norm_ptr, given_ptr, out_ptr, scale_ptr, eps, x_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, GIVEN: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row, which its program holds in parts of WIDTH. ACTIVATION: of rows of gate and up, SIZE each."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    parts: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    held: tl.tuple = ()
    for part in tl.static_range(parts):
        i = part * WIDTH + k
        held += (_activated_input(x_ptr + row * x_stride, i, SIZE, ACTIVATION),)
    if NORM:
        held = _normed(held, norm_ptr, eps, SIZE, WIDTH)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        largest = tl.zeros([WIDTH], tl.float32)
        for part in tl.static_range(parts):
            largest = tl.maximum(largest, tl.abs(held[part].to(tl.float32)))
        scale = tl.maximum(tl.max(largest, 0), LEAST) / LARGEST
    for part in tl.static_range(parts):
        i = part * WIDTH + k
        tl.store(out_ptr + row * SIZE + i, to_fp8(held[part].to(tl.float32) / scale, LARGEST), mask=i < SIZE)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _activated_input(line, i, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Inputs i of a row, in its format; of gate and up, rounded as by a separate activation."""
    x = tl.load(line + i, mask=i < SIZE, other=0.0)
    if ACTIVATION is not None:
        up = tl.load(line + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        return gate_mul(x.to(tl.float32), up, ACTIVATION).to(x.dtype)
    else:
        return x


@triton.jit
def _normed(held, norm_ptr, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """The norm of a row in parts of WIDTH, rounded as by a separate norm."""
    squares = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        x = held[part].to(tl.float32)
        squares += x * x
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE + eps)
    normed: tl.tuple = ()
    for part in tl.static_range((SIZE + WIDTH - 1) // WIDTH):
        i = part * WIDTH + tl.arange(0, WIDTH)
        norm = tl.load(norm_ptr + i, mask=i < SIZE, other=0.0).to(tl.float32)
        normed += ((held[part].to(tl.float32) * inverse * norm).to(held[part].dtype),)
    return normed


@triton.jit(do_not_specialize=["rows"])
def _quantize_groups_kernel(
    x_ptr, norm_ptr, out_ptr, scale_ptr, eps, x_stride, rows,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM: a program has the whole row. ACTIVATION: of rows of gate and up. rows: of the scales, which may be more
    than the grid's."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH if NORM else 1
    first = tl.program_id(1) * WIDTH
    k = tl.arange(0, WIDTH)
    held: tl.tuple = ()
    for part in tl.static_range(parts):
        held += (_activated_input(x_ptr + row * x_stride, first + part * WIDTH + k, SIZE, ACTIVATION),)
    if NORM:
        held = _normed(held, norm_ptr, eps, SIZE, WIDTH)
    for part in tl.static_range(parts):
        i = first + part * WIDTH + k
        numbers, scale = quantized_in_groups(held[part].to(tl.float32), WIDTH, GROUP, LARGEST, LEAST)
        tl.store(out_ptr + row * SIZE + i, numbers, mask=i < SIZE)
        g = (first + part * WIDTH) // GROUP + tl.arange(0, WIDTH // GROUP)
        tl.store(scale_ptr + g.to(tl.int64) * rows + row, scale, mask=g * GROUP < SIZE)


@triton.jit
def quantized_in_groups(x, WIDTH: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """x float32 [WIDTH] in FP8, and scales [WIDTH // GROUP]."""
    groups = tl.reshape(x, (WIDTH // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), LEAST) / LARGEST
    return tl.reshape(to_fp8(groups / scale[:, None], LARGEST), (WIDTH,)), scale


@triton.jit
def to_fp8(x, LARGEST: tl.constexpr):
    """Clamps: a quotient by a rounded scale may be slightly above the format's largest number."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float8e4nv)
