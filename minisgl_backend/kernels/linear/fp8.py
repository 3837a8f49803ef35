"""GEMMs with FP8 weights on GPUs that multiply FP8 (compute capability 8.9 and later).

Activations are quantized by a separate kernel, with the norm inside: with quantization in each program of the GEMM,
which then reads all of x twice, the GEMM took twice as long. GEMMs with few rows are bound by reading the weights: a
Triton kernel streams them through the tensor cores, designed like small_rows.py's `_linear_kernel` and with its
epilogues. More rows use torch's `_scaled_mm`, sgl-kernel's where that was measured faster, or fp8_many_rows.py where
neither supports them.

Hopper's tensor cores accumulate FP8 with 14 bits (DeepSeek-V3, section 3.3.2); after PROMOTE inputs the partial sum is
added to one in float32.

`pdl`: programmatic dependent launch, whose rules are in small_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels import elementwise
from minisgl_backend.kernels.device_facts import TORCH_BLOCKS
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear import fp8_many_rows as many_rows
from minisgl_backend.kernels.linear import sgl
from minisgl_backend.kernels.linear.call import BARE, GemmCall
from minisgl_backend.kernels.linear.choose import LinearKey, linear_chooser
from minisgl_backend.kernels.linear.epilogue import leave_part, store_outputs, sum_of_parts
from minisgl_backend.kernels.linear.fp8_quantize import quantize_groups, quantize_tokens
from minisgl_backend.kernels.linear.fp8_torch import FP8, Fp8Kernels, Fp8Weight
from minisgl_backend.kernels.linear.plain.gpu import TritonPlainKernels
from minisgl_backend.kernels.linear.small_rows import LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST as LARGEST_SHARED
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit

# Rows are padded to a multiple of this: some other numbers cuBLAS refuses, and CUTLASS copies its input for.
_MULTIPLES = {"scaled_mm_blocks": 16, "sgl_scaled_mm_blocks": 16}
_BLOCKS_ALIGNMENT = 4  # torch needs rows of a weight's scales to be a multiple of this many blocks
_MAX_SPLIT = 8
PROMOTE = 256


class TritonFp8Kernels(Fp8Kernels):
    """See `Fp8Kernels`. Nothing synchronises with the device."""

    def __init__(self, plain: TritonPlainKernels, device: torch.device) -> None:
        """plain: of the same device; its workspace is shared, so the kernels must not overlap."""
        super().__init__(plain.ops)
        self._plain = plain
        facts = plain.ops.facts
        if not torch_has_blocks(device):
            facts = replace(facts, libraries=facts.libraries - {TORCH_BLOCKS})
        self._num_sms = facts.multiprocessors
        self._chooser = linear_chooser("fp8", facts)

    def linear(self, x: torch.Tensor, weight: Fp8Weight, call: GemmCall = BARE) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        size_out = len(weight.numbers)
        if len(x) == 0:
            out = x.new_empty((0, size_out // 2 if call.activation else size_out))
            return out if call.residual is None else call.residual
        key = LinearKey.of(x, size_out, call, block=weight.block)
        return self.multiply(self._chooser.kernel(key), x, weight, call)

    def multiply(self, kernel: str, x: torch.Tensor, weight: Fp8Weight, call: GemmCall) -> torch.Tensor:
        """See `measured.Multiply`."""
        pdl = self._plain.ops.pdl(x)
        if kernel == "fp8_few_rows":
            return linear(x, weight, self._plain.workspace, call, num_sms=self._num_sms, pdl=pdl)
        norm_weight, eps, bias, residual, activation = call
        numbers, scale, x_scale, block = weight
        if block is None:
            x8, scales = quantize_tokens(x, norm_weight, eps, x_scale=x_scale)
        else:
            x8, scales = quantize_groups(x, block[1], norm_weight, eps, multiple=_MULTIPLES.get(kernel, 1))
        if kernel == "fp8_many_rows":
            out = many_rows.linear(x8, scales, numbers, scale, x.dtype, block=block, bias=bias, residual=residual)
            return out if activation is None else elementwise.activate_mul(out, activation, pdl)
        if kernel == "scaled_mm":
            out = torch._scaled_mm(
                x8, numbers.t(), scale_a=scales.unsqueeze(1), scale_b=scale.unsqueeze(0), out_dtype=x.dtype
            )
        elif kernel == "scaled_mm_blocks":
            out = scaled_mm_blocks(x8, scales, numbers, scale)[: len(x)]
        elif kernel == "sgl_scaled_mm":
            out, bias = sgl.fp8_scaled_mm(x8, scales, numbers, scale, x.dtype, bias), None
        elif kernel == "sgl_scaled_mm_blocks":
            out = sgl.fp8_blockwise_scaled_mm(x8, scales, numbers, scale, x.dtype)[: len(x)]
        else:
            raise ValueError(f"kernel is {kernel!r}; allowed: those of the table except torch")
        if bias is not None:
            out += bias
        if residual is not None:
            return residual.add_(out)
        return out if activation is None else elementwise.activate_mul(out, activation, pdl)

    def prepare_linear(self, weights: Sequence[Fp8Weight], rows: Sequence[int], longest: int) -> None:
        numbers = weights[0].numbers
        self._plain.kernel_tuner.tune(
            self._chooser, self.multiply, weights, numbers.nbytes, (numbers.shape[0], numbers.shape[1]), rows, longest
        )


def scaled_mm_blocks(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torch's block-scaled FP8 GEMM (weights in blocks of 128 x 128, x in groups of 128), result in bfloat16: cuBLAS
    12.9 or later on Hopper. Both sizes of the weight are whole blocks; x_scale's columns are contiguous."""
    from torch.nn.functional import ScalingType, scaled_mm  # since torch 2.10

    if missing := -scale.shape[1] % _BLOCKS_ALIGNMENT:  # in few models; F.pad copies even where nothing is missing
        scale = F.pad(scale, (0, missing))
    out: torch.Tensor = scaled_mm(
        x, weight.t(), x_scale, ScalingType.BlockWise1x128, scale.t(), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out


@cache
def torch_has_blocks(device: torch.device) -> bool:
    """Whether torch and its cuBLAS have the block-scaled GEMM on this GPU: tries a small one."""
    one = torch.ones((128, 512), device=device).to(FP8)
    try:
        found = scaled_mm_blocks(
            one, torch.ones((4, 128), device=device).t(), one, torch.ones((1, 4), device=device)
        )  # fmt: skip
        return bool((found == 512).all())
    except (ImportError, RuntimeError, ValueError):
        return False


@dataclass(frozen=True)
class LinearShape:
    """Tiling of a GEMM: tiles of the weight; `split` programs share each row (split-K)."""

    tile_out: int
    tile_in: int
    split: int
    num_stages: int


@cache
def linear_shape(
    rows: int,
    size_out: int,
    size_in: int,
    gated: bool = False,
    num_sms: int = 132,
    shared: int = LARGEST_SHARED,
    block_in: int | None = None,
) -> LinearShape:
    """The tiling that was fastest on an H100 in a chain of Qwen3-14B's GEMMs with 1, 8 and 64 rows. block_in: inputs
    that share a scale."""
    padded = max(16, next_power_of_2(rows))
    tile_out, tile_in, split = 64, 128 if gated and padded > 32 else 256, 1
    most = num_sms * 4 / 5  # programs
    if block_in is not None:
        tile_in, most = block_in, num_sms * 3 / 2
    programs = cdiv(size_out, tile_out)
    while not gated and programs * split < most and split < _MAX_SPLIT and size_in >= split * 4 * tile_in:
        split *= 2
    if block_in is None:
        deepest = 5 if split == 1 and tile_in == 256 else 3
    else:
        deepest = 3 if gated or padded > 16 else 4 if split > 1 else 6
    tile_rows = tile_out * (2 if gated else 1) + padded
    stages = stages_that_fit(deepest, tile_in * tile_rows, shared)
    return LinearShape(tile_out, tile_in, split, stages)


def linear(
    x: torch.Tensor,
    weight: Fp8Weight,
    workspace: LinearWorkspace,
    call: GemmCall = BARE,
    *,
    shape: LinearShape | None = None,
    num_sms: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """See `Fp8Kernels.linear`; for few rows, see choose.py."""
    norm_weight, eps, bias, residual, activation = call
    weight_numbers, scale, x_scale, block = weight
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = len(weight_numbers) // 2 if gated else len(weight_numbers)
    block_out, block_in = block or (0, 0)
    shape = shape or linear_shape(
        rows, size_out, size_in, gated, num_sms, shared_memory(x.device), None if block is None else block_in
    )
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    if block is None:
        numbers, scales = quantize_tokens(x, norm_weight, eps, pdl, x_scale)
    else:
        numbers, scales = quantize_groups(x, block_in, norm_weight, eps, pdl)
    padded = max(16, next_power_of_2(rows))
    split = max(1, min(shape.split, workspace.max_split, workspace.partial.numel() // (size_out * padded)))
    part = cdiv(cdiv(size_in, split), shape.tile_in) * shape.tile_in
    split = cdiv(size_in, part)
    _linear_kernel[(cdiv(size_out, shape.tile_out), split)](
        numbers, scales, weight_numbers, scale, x if bias is None else bias, x if residual is None else residual, out,
        workspace.partial, workspace.counters, rows, SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split,
        ROWS=padded, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in, BLOCK_OUT=block_out, BLOCK_IN=block_in,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation,
        IMPRECISE=min(PROMOTE, shape.tile_in), num_warps=4, num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, rows,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    IMPRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x and weight are FP8 with a scale for each row. With a BLOCK_IN, which TILE_IN divides, x has a scale for each
    row and block of inputs, and the weight one for each block of outputs and inputs."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    k = tl.arange(0, TILE_IN)
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    x_rows = x_ptr + r[:, None] * SIZE_IN
    groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN if BLOCK_IN else 1
    if BLOCK_IN:
        w_scales = scale_ptr + (o // BLOCK_OUT) * groups
        up_scales = scale_ptr + ((SIZE_OUT + o) // BLOCK_OUT) * groups
    else:
        w_scale = tl.load(scale_ptr + o, mask=o_ok, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    if BLOCK_IN == 0:
        x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    begin = split * PART
    end = tl.minimum(begin + PART, SIZE_IN)
    if BLOCK_IN:
        g = begin // BLOCK_IN
        x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
        w_scale = tl.load(w_scales + g, mask=o_ok, other=0.0)
        if GATED:
            up_scale = tl.load(up_scales + g, mask=o_ok, other=0.0)
    for start in tl.range(begin, end, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0)
        x = tl.trans(tl.load(x_rows + i[None, :], mask=r_ok[:, None] & i_ok[None, :], other=0.0))
        if BLOCK_IN:
            acc += tl.dot(w, x) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=IMPRECISE)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
            if BLOCK_IN:
                acc_up += tl.dot(w_up, x) * (up_scale[:, None] * x_scale[None, :])
            else:
                acc_up = tl.dot(w_up, x, acc_up, max_num_imprecise_acc=IMPRECISE)
        if BLOCK_IN:  # scales of the next block, while its tiles are in flight
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN
            x_scale = tl.load(x_scale_ptr + g * rows + r, mask=r_ok, other=0.0)
            w_scale = tl.load(w_scales + g, mask=o_ok, other=0.0)
            if GATED:
                up_scale = tl.load(up_scales + g, mask=o_ok, other=0.0)

    if SPLIT > 1:
        if leave_part(acc, partial_ptr, counters_ptr, tile, split, o, o_ok, SIZE_OUT) != SPLIT - 1:
            return
        acc = sum_of_parts(partial_ptr, counters_ptr, tile, o, o_ok, SPLIT, SIZE_OUT, TILE_OUT, ROWS)

    if BLOCK_IN == 0:
        acc = acc * w_scale[:, None] * x_scale[None, :]
    if GATED and BLOCK_IN == 0:
        up_scale = tl.load(scale_ptr + SIZE_OUT + o, mask=o_ok, other=0.0)
        acc_up = acc_up * up_scale[:, None] * x_scale[None, :]
    store_outputs(
        acc, acc_up, bias_ptr, residual_ptr, out_ptr, o, o_ok, r, r_ok, SIZE_OUT, BIAS, RESIDUAL, GATED, ACTIVATION
    )  # fmt: skip
