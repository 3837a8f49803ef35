"""GEMMs with FP8 weights on GPUs that multiply FP8 (compute capability 8.9 and later).

Activations are quantized by a kernel of their own, with the norm inside: where each program of the GEMM did it by
itself, reading all of x twice, the GEMM took twice as long. Up to MAX_ROWS rows are bound by the bytes of the weights:
a kernel of the Triton language streams them past the matrix units, after the design of small_rows.py's `_linear_kernel`
and with its epilogues. More are multiplied by torch's `_scaled_mm`.

Hopper's matrix units add products of FP8 numbers with 14 bits (DeepSeek-V3, section 3.3.2); after PROMOTE inputs what
they have is added to a sum in float32.

`pdl`: programmatic dependent launch, whose rules stand in small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels import elementwise
from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.fp8_torch import FP8, LARGEST, LEAST, Fp8Kernels
from minisgl_backend.kernels.linear.small_rows import LinearWorkspace
from minisgl_backend.kernels.shared_memory import LARGEST as LARGEST_SHARED
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit
from minisgl_backend.kernels.triton_ops import TritonPlainKernels

MAX_ROWS = 64  # of the kernel; more are torch's
ROWWISE = (9, 0)  # capability from which torch multiplies with a scale for each row
_ALIGNMENT = 16  # numbers that sizes of `_scaled_mm` are multiples of
_MAX_SPLIT = 8
PROMOTE = 256


class TritonFp8Kernels(Fp8Kernels):
    """The contracts are those of `Fp8Kernels`. Nothing synchronises with the device."""

    def __init__(self, plain: TritonPlainKernels, device: torch.device) -> None:
        """plain: of the same device, whose workspace is used: the kernels follow one another."""
        super().__init__(plain.ops)
        self._plain = plain
        properties = torch.cuda.get_device_properties(device)
        self._num_sms = properties.multi_processor_count
        self._is_rowwise = (properties.major, properties.minor) >= ROWWISE

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
        x_scale: torch.Tensor | None = None,
        block: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        if x_scale is not None or block is not None:
            return super().linear(
                x, weight, scale, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual,
                activation=activation, x_scale=x_scale, block=block,
            )  # fmt: skip
        rows, (size_out, size_in) = len(x), weight.shape
        pdl = self._plain.ops.pdl(x)
        if 0 < rows <= MAX_ROWS:
            return linear(
                x, weight, scale, self._plain.workspace, norm_weight=norm_weight, eps=eps, bias=bias,
                residual=residual, activation=activation, num_sms=self._num_sms, pdl=pdl,
            )  # fmt: skip
        if rows == 0 or size_out % _ALIGNMENT or size_in % _ALIGNMENT:
            return super().linear(
                x, weight, scale, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, activation=activation
            )
        numbers, x_scale = quantize_tokens(x, norm_weight, eps)
        out = self._scaled_mm(numbers, x_scale, weight, scale, x.dtype)
        if bias is not None:
            out += bias
        if activation is not None:
            return elementwise.activate_mul(out, activation, pdl)
        return out if residual is None else residual.add_(out)

    def _scaled_mm(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if self._is_rowwise and dtype == torch.bfloat16:
            return torch._scaled_mm(
                x, weight.t(), scale_a=x_scale.unsqueeze(1), scale_b=scale.unsqueeze(0), out_dtype=dtype
            )
        one = torch.ones((), dtype=torch.float32, device=x.device)
        out = torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (out.mul_(x_scale.unsqueeze(1)).mul_(scale)).to(dtype)

    def moe(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_scale: torch.Tensor,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        residual: torch.Tensor | None = None,
        activation: str = "silu",
        x_scales: torch.Tensor | None = None,
        blocks: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> torch.Tensor:
        if x_scales is not None or blocks is not None:
            return super().moe(
                x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale, residual, activation,
                x_scales, blocks,
            )  # fmt: skip
        from minisgl_backend.kernels.moe.fp8 import moe  # which needs what is above

        return moe(
            x, expert_ids, expert_weights, gate_up, gate_up_scale, down, down_scale, residual, activation,
            pdl=self._plain.moe_pdl(x),
        )  # fmt: skip


def quantize_tokens(
    x: torch.Tensor, norm_weight: torch.Tensor | None = None, eps: float = 0.0, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) [num_tokens, size] as FP8, and its float32 scales [num_tokens]. norm_weight [size]: RMSNorm first."""
    num_tokens, size = x.shape
    numbers = torch.empty((num_tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    _quantize_kernel[(num_tokens,)](
        x, norm_weight if norm_weight is not None else x, numbers, scales, eps, x.stride(0), SIZE=size, PADDED=padded,
        NORM=norm_weight is not None, LARGEST=LARGEST, LEAST=LEAST, num_warps=min(16, max(1, padded // 512)),
        **pdl_options(pdl),
    )  # fmt: skip
    return numbers, scales


@triton.jit
def _quantize_kernel(
    x_ptr, norm_ptr, out_ptr, scale_ptr, eps, x_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    ok = i < SIZE
    x = tl.load(x_ptr + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + i, mask=ok, other=0.0).to(tl.float32)
        x = x / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps) * norm
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)  # as a norm by itself rounds
    scale = tl.maximum(tl.max(tl.abs(x), 0), LEAST) / LARGEST
    tl.store(out_ptr + row * SIZE + i, _to_fp8(x / scale, LARGEST), mask=ok)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _to_fp8(x, LARGEST: tl.constexpr):
    """A quotient by a rounded scale may be a little more than the format's largest number."""
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float8e4nv)


@dataclass(frozen=True)
class LinearShape:
    """How a GEMM is cut into programs: tiles of the weight, of which `split` programs share a row."""

    tile_out: int
    tile_in: int
    split: int
    num_stages: int


@cache
def linear_shape(
    rows: int, size_out: int, size_in: int, gated: bool = False, num_sms: int = 132, shared: int = LARGEST_SHARED
) -> LinearShape:
    """The cut that was fastest on an H100 in a chain of Qwen3-14B's GEMMs with 1, 8 and 64 rows."""
    padded = max(16, triton.next_power_of_2(rows))
    tile_out, tile_in, split = 64, 128 if gated and padded > 32 else 256, 1
    programs = triton.cdiv(size_out, tile_out)
    while not gated and programs * split * 5 < num_sms * 4 and split < _MAX_SPLIT and size_in >= split * 4 * tile_in:
        split *= 2
    lines = tile_out * (2 if gated else 1) + padded
    stages = stages_that_fit(5 if split == 1 and tile_in == 256 else 3, tile_in * lines, shared)
    return LinearShape(tile_out, tile_in, split, stages)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    num_sms: int = 132,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Fp8Kernels.linear`'s, for up to MAX_ROWS rows."""
    gated, (rows, size_in) = activation is not None, x.shape
    size_out = len(weight) // 2 if gated else len(weight)
    shape = linear_shape(rows, size_out, size_in, gated, num_sms, shared_memory(x.device))
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device)
    numbers, x_scale = quantize_tokens(x, norm_weight, eps, pdl)
    padded = max(16, triton.next_power_of_2(rows))
    split = max(1, min(shape.split, workspace.max_split, workspace.partial.numel() // (size_out * padded)))
    part = triton.cdiv(triton.cdiv(size_in, split), shape.tile_in) * shape.tile_in
    split = triton.cdiv(size_in, part)
    _linear_kernel[(triton.cdiv(size_out, shape.tile_out), split)](
        numbers, x_scale, weight, scale, x if bias is None else bias, x if residual is None else residual, out,
        workspace.partial, workspace.counters, rows, SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split,
        ROWS=padded, TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in, BIAS=bias is not None,
        RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation, IMPRECISE=min(PROMOTE, shape.tile_in),
        num_warps=4, num_stages=shape.num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr, rows,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, IMPRECISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x and weight are FP8, with a scale for each row."""
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
    w_scale = tl.load(scale_ptr + o, mask=o_ok, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    x_scale = tl.load(x_scale_ptr + r, mask=r_ok, other=0.0)
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    begin = split * PART
    end = tl.minimum(begin + PART, SIZE_IN)
    for start in tl.range(begin, end, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w_ok = o_ok[:, None] & i_ok[None, :]
        w = tl.load(weight_rows + i[None, :], mask=w_ok, other=0.0)
        x = tl.trans(tl.load(x_rows + i[None, :], mask=r_ok[:, None] & i_ok[None, :], other=0.0))
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=IMPRECISE)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=w_ok, other=0.0)
            acc_up = tl.dot(w_up, x, acc_up, max_num_imprecise_acc=IMPRECISE)

    if SPLIT > 1:
        # The last program to arrive adds the parts in order.
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
        tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
        for s in tl.static_range(SPLIT):
            part_slab = (s * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")

    acc = acc * w_scale[:, None] * x_scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        up_scale = tl.load(scale_ptr + SIZE_OUT + o, mask=o_ok, other=0.0)
        acc_up = acc_up * up_scale[:, None] * x_scale[None, :]
        if BIAS:
            acc_up += tl.load(bias_ptr + SIZE_OUT + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
        acc = gate_mul(acc, acc_up, ACTIVATION)
    address = r[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & o_ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
