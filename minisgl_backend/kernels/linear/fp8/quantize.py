"""Quantizes activations to FP8 with the norm inside: a scale per token, per group of inputs, or a given one.

`pdl`: programmatic dependent launch, whose rules are in small_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, LARGEST, LEAST, Fp8Weight

_WIDTH = 2048  # inputs of a program that only needs its own groups of a row (no norm)


def quantize_for(
    weight: Fp8Weight, x: torch.Tensor, call: GemmCall, multiple: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) and its scales as a GEMM of many rows with this weight takes them; multiple: see `quantize_groups`."""
    if weight.block is None:
        return quantize_tokens(x, call.norm_weight, call.eps, x_scale=weight.x_scale)
    return quantize_groups(x, weight.block[1], call.norm_weight, call.eps, multiple=multiple)


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
    padded = next_power_of_2(size)
    if num_tokens > 0:
        _quantize_kernel[(num_tokens,)](
            x, norm_weight if norm_weight is not None else x, scales if x_scale is None else x_scale, numbers, scales,
            eps, x.stride(0), SIZE=size, PADDED=padded, NORM=norm_weight is not None, GIVEN=x_scale is not None,
            LARGEST=LARGEST, LEAST=LEAST, num_warps=min(16, max(1, padded // 512)), **pdl_options(pdl),
        )  # fmt: skip
    return numbers, scales


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
    width = next_power_of_2(size) if norm_weight is not None else min(_WIDTH, next_power_of_2(size))
    width = max(width, group)
    if num_tokens > 0:
        _quantize_groups_kernel[(num_tokens, cdiv(size, width))](
            x, norm_weight if norm_weight is not None else x, numbers, scales, eps, x.stride(0), rows, SIZE=size,
            WIDTH=width, GROUP=group, NORM=norm_weight is not None, LARGEST=LARGEST, LEAST=LEAST,
            num_warps=min(16, max(1, width // 512)), **pdl_options(pdl),
        )  # fmt: skip
    return numbers, scales.t()


@triton.jit
def _quantize_kernel(
    x_ptr, norm_ptr, given_ptr, out_ptr, scale_ptr, eps, x_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, GIVEN: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    ok = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        x = _normed(x, tl.load(norm_ptr + i, mask=ok, other=0.0), eps, SIZE, x_ptr.dtype.element_ty)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0), LEAST) / LARGEST
    tl.store(out_ptr + row * SIZE + i, _to_fp8(x / scale, LARGEST), mask=ok)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _quantize_groups_kernel(
    x_ptr, norm_ptr, out_ptr, scale_ptr, eps, x_stride, rows,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """NORM: a program has the whole row. rows: of the scales, which may be more than the grid's."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    ok = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        x = _normed(x, tl.load(norm_ptr + i, mask=ok, other=0.0), eps, SIZE, x_ptr.dtype.element_ty)
    numbers, scale = quantized_in_groups(x, WIDTH, GROUP, LARGEST, LEAST)
    tl.store(out_ptr + row * SIZE + i, numbers, mask=ok)
    g = tl.program_id(1) * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP)
    tl.store(scale_ptr + g.to(tl.int64) * rows + row, scale, mask=g * GROUP < SIZE)


@triton.jit
def quantized_in_groups(x, WIDTH: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """x float32 [WIDTH] in FP8, and scales [WIDTH // GROUP]."""
    groups = tl.reshape(x, (WIDTH // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(groups), 1), LEAST) / LARGEST
    return tl.reshape(_to_fp8(groups / scale[:, None], LARGEST), (WIDTH,)), scale


@triton.jit
def _normed(x, norm, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps) * norm.to(tl.float32)
    return x.to(dtype).to(tl.float32)  # rounded as by a separate norm


@triton.jit
def _to_fp8(x, LARGEST: tl.constexpr):
    """Clamps: a quotient by a rounded scale may be slightly above the format's largest number."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float8e4nv)
