"""Mixtures of experts in FP8 for many tokens by sgl-kernel's grouped GEMM (CUTLASS; Apache-2.0): blocks of 128 x 128.

Its inputs are rows in the order of experts. So a token's row is quantized once and written to the places of all its
pairs, and what goes between the GEMMs is activated and quantized in one kernel. The wheels fail in many ways on other
versions of torch and CUDA: `has_grouped_gemm` tries a small one.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import next_power_of_2
from minisgl_backend.kernels.linear.fp8.quantize import quantized_in_groups
from minisgl_backend.kernels.linear.fp8.reference import FP8, LARGEST, LEAST, Fp8Weight
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels

BLOCK = 128
WORKSPACE_BYTES = 32 << 20  # of CUTLASS: tensor maps of its programs


class Groups(NamedTuple):
    """How many rows each expert has, and where they begin; on the device."""

    sizes: torch.Tensor  # int32 [2, num_experts, 3]: rows, outputs, inputs of the GEMMs with gate_up and with down
    offsets: torch.Tensor  # int32 [num_experts]
    strides: torch.Tensor  # int64 [3, num_experts]: rows of hidden states, of gate_up's outputs, and between the GEMMs


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Fp8Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for the cases that moe/choose.py gives to this file."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    ids, weights = ids.contiguous(), weights.contiguous()
    hidden, size, k = experts.hidden_size, experts.intermediate_size, ids.shape[1]
    tiles = align(ids, experts.num_experts, BLOCK)
    groups = groups_of(tiles.totals, experts.num_experts, hidden, size)
    of_hidden, of_both, of_size = groups.strides
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
    both = x.new_empty((ids.numel(), 2 * size))
    out = x.new_empty((ids.numel(), hidden))
    rows = quantized_rows(x, tiles.place, k)
    _multiply(both, rows, experts.gate_up, (of_hidden, of_both), groups.sizes[0], groups.offsets, workspace)
    rows = activated_rows(both, experts.activation)
    _multiply(out, rows, experts.down, (of_size, of_hidden), groups.sizes[1], groups.offsets, workspace)
    return combine(out, k, call.residual, place=tiles.place, weights=weights)


def _multiply(
    out: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor],
    weight: Fp8Weight,
    strides: tuple[torch.Tensor, torch.Tensor],
    sizes: torch.Tensor,
    offsets: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    """rows: numbers and scales; strides: of inputs, and of outputs."""
    from sgl_kernel import es_fp8_blockwise_scaled_grouped_mm as multiply

    numbers, scale = weight.numbers.transpose(1, 2), weight.scale.transpose(1, 2)
    size_in, size_out = strides
    multiply(out, rows[0], numbers, rows[1], scale, size_in, size_in, size_out, sizes, offsets, workspace)


@cache
def has_grouped_gemm(device: torch.device) -> bool:
    """Whether sgl-kernel's works on this GPU: tries a small one, in which an expert has no rows."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    experts, size = 4, 256
    counts = torch.tensor([3, 0, 130, 1], dtype=torch.int32, device=device)
    groups = groups_of(counts, experts, size, size)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randint(-8, 8, (experts, size, size), generator=generator, device=device).float()
    x = torch.randint(-8, 8, (134, size), generator=generator, device=device).float()
    scale = torch.rand((experts, size // BLOCK, size // BLOCK), generator=generator, device=device)
    x_scale = torch.rand((134, size // BLOCK), generator=generator, device=device)
    out = torch.zeros((134, size), dtype=torch.bfloat16, device=device)
    operand = Fp8Weight(weight.to(FP8), scale, None, (BLOCK, BLOCK))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wide = weight * scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    rows = (x * x_scale.repeat_interleave(BLOCK, 1)).split(counts.tolist())
    expected = torch.cat([part @ one.t() for part, one in zip(rows, wide, strict=True)])
    strides = (groups.strides[0], groups.strides[0])
    try:
        _multiply(out, (x.to(FP8), x_scale), operand, strides, groups.sizes[1], groups.offsets, workspace)
        return bool(((out.float() - expected).abs() <= 2e-2 * expected.abs().amax()).all())
    except (ImportError, AttributeError, RuntimeError, NotImplementedError):
        return False


def groups_of(totals: torch.Tensor, num_experts: int, hidden: int, size: int) -> Groups:
    """totals int32 [at least num_experts]: rows of each expert."""
    groups = Groups(
        torch.empty((2, num_experts, 3), dtype=torch.int32, device=totals.device),
        torch.empty(num_experts, dtype=torch.int32, device=totals.device),
        torch.empty((3, num_experts), dtype=torch.int64, device=totals.device),
    )
    _groups_kernel[(1,)](totals, *groups, HIDDEN=hidden, SIZE=size, EXPERTS=num_experts,
                         EXPERTS_PADDED=next_power_of_2(num_experts), num_warps=4)  # fmt: skip
    return groups


def quantized_rows(x: torch.Tensor, place: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, size] in FP8 at the places int32 [num_tokens * k] of each token's pairs, [num_tokens * k, size];
    and float32 scales [num_tokens * k, size / BLOCK]."""
    num_tokens, size = x.shape
    numbers = torch.empty((num_tokens * k, size), dtype=FP8, device=x.device)
    scales = torch.empty((num_tokens * k, size // BLOCK), dtype=torch.float32, device=x.device)
    width = next_power_of_2(size)
    _place_rows_kernel[(num_tokens,)](
        x, place, numbers, scales, x.stride(0), K=k, SIZE=size, WIDTH=width, GROUP=BLOCK, LARGEST=LARGEST, LEAST=LEAST,
        num_warps=max(1, min(8, width // 512)),
    )  # fmt: skip
    return numbers, scales


def activated_rows(both: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """activation(gate) * up of rows [rows, gate and up], in FP8; and scales as of `quantized_rows`."""
    rows, size = both.shape[0], both.shape[1] // 2
    numbers = torch.empty((rows, size), dtype=FP8, device=both.device)
    scales = torch.empty((rows, size // BLOCK), dtype=torch.float32, device=both.device)
    width = next_power_of_2(size)
    _activate_rows_kernel[(rows,)](
        both, numbers, scales, SIZE=size, WIDTH=width, GROUP=BLOCK, ACTIVATION=activation, LARGEST=LARGEST, LEAST=LEAST,
        num_warps=max(1, min(8, width // 512)),
    )  # fmt: skip
    return numbers, scales


@triton.jit
def _groups_kernel(
    totals_ptr, sizes_ptr, offsets_ptr, strides_ptr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, EXPERTS_PADDED)
    ok = e < EXPERTS
    rows = tl.load(totals_ptr + e, mask=ok, other=0)
    tl.store(offsets_ptr + e, tl.cumsum(rows, 0) - rows, mask=ok)
    first = sizes_ptr + e * 3
    second = first + EXPERTS * 3
    tl.store(first, rows, mask=ok)
    tl.store(first + 1, tl.full([EXPERTS_PADDED], 2 * SIZE, tl.int32), mask=ok)
    tl.store(first + 2, tl.full([EXPERTS_PADDED], HIDDEN, tl.int32), mask=ok)
    tl.store(second, rows, mask=ok)
    tl.store(second + 1, tl.full([EXPERTS_PADDED], HIDDEN, tl.int32), mask=ok)
    tl.store(second + 2, tl.full([EXPERTS_PADDED], SIZE, tl.int32), mask=ok)
    tl.store(strides_ptr + e, tl.full([EXPERTS_PADDED], HIDDEN, tl.int64), mask=ok)
    tl.store(strides_ptr + EXPERTS + e, tl.full([EXPERTS_PADDED], 2 * SIZE, tl.int64), mask=ok)
    tl.store(strides_ptr + 2 * EXPERTS + e, tl.full([EXPERTS_PADDED], SIZE, tl.int64), mask=ok)


@triton.jit
def _place_rows_kernel(
    x_ptr, place_ptr, out_ptr, scale_ptr, x_stride, K: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    g = tl.arange(0, WIDTH // GROUP)
    groups: tl.constexpr = SIZE // GROUP
    x = tl.load(x_ptr + token * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    numbers, scales = quantized_in_groups(x, WIDTH, GROUP, LARGEST, LEAST)
    for choice in tl.static_range(K):
        row = tl.load(place_ptr + token * K + choice).to(tl.int64)
        tl.store(out_ptr + row * SIZE + i, numbers, mask=i < SIZE)
        tl.store(scale_ptr + row * groups + g, scales, mask=g < groups)


@triton.jit
def _activate_rows_kernel(
    x_ptr, out_ptr, scale_ptr, SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    g = tl.arange(0, WIDTH // GROUP)
    groups: tl.constexpr = SIZE // GROUP
    line = x_ptr + row * 2 * SIZE + i
    gate = tl.load(line, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(line + SIZE, mask=i < SIZE, other=0.0).to(tl.float32)
    numbers, scales = quantized_in_groups(gate_mul(gate, up, ACTIVATION), WIDTH, GROUP, LARGEST, LEAST)
    tl.store(out_ptr + row * SIZE + i, numbers, mask=i < SIZE)
    tl.store(scale_ptr + row * groups + g, scales, mask=g < groups)
