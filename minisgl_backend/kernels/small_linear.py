"""Matrix products with few rows (decode at small batch), bound by reading the weights, in the Triton language.

Knows nothing of models. A step at batch 1 to 16 spends most of its time in launches and in ramping up and down, so
each function here does what would otherwise be two or three kernels: the norm before the product, the activation
or the residual addition after it. The norm needs no pass of its own: y = (x * w_norm) @ W / rms(x), and the sum of
squares is gathered by the same loop that reads x.

Products whose output is too narrow to fill the device are split along the input dimension; the program that
arrives last adds the partial sums in order, so that results do not depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 64


@dataclass(frozen=True)
class LinearShape:
    """How one product is cut into programs."""

    tile_out: int
    tile_in: int
    split: int
    num_warps: int
    num_stages: int


class LinearWorkspace:
    """Partial sums and arrival counters; the counters return to zero after every launch."""

    def __init__(self, device: torch.device, max_out: int = 32768, max_split: int = 16) -> None:
        self.partial = torch.empty(max_split * max_out * MAX_ROWS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_out, dtype=torch.int32, device=device)
        self.max_split = max_split


def linear_shape(rows: int, size_out: int, size_in: int, num_sms: int = 132) -> LinearShape:
    """The cut that was measured best on an H200; see benchmarks/kernels.py."""
    tile_out = 16 if size_out <= 8192 else 64
    tile_in = 256 if rows <= 16 else 128
    split, programs = 1, triton.cdiv(size_out, tile_out)
    while programs * split < num_sms and split < 8 and size_in // (split * 2) >= tile_in:
        split *= 2
    return LinearShape(tile_out, tile_in, split, 4, 4)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    shape: LinearShape | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """epilogue(norm(x) @ weight.T), x [rows <= 64, size_in], weight [size_out, size_in], both contiguous.

    norm_weight [size_in]: RMSNorm of x first. bias [size_out]. residual [rows, size_out] is added to the result.
    gated: weight holds gate rows, then as many up rows; returns silu(gate) * up, [rows, size_out / 2].
    """
    rows, size_in = x.shape
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = shape or linear_shape(rows, size_out, size_in)
    split = 1 if gated else shape.split
    out = torch.empty((rows, size_out), dtype=x.dtype, device=x.device) if out is None else out
    part = triton.cdiv(triton.cdiv(size_in, split), shape.tile_in) * shape.tile_in
    split = triton.cdiv(size_in, part)
    _linear_kernel[(triton.cdiv(size_out, shape.tile_out), split)](
        x, weight, norm_weight if norm_weight is not None else x, bias if bias is not None else x,
        residual if residual is not None else x, out, workspace.partial, workspace.counters,
        rows, eps, x.stride(0),
        SIZE_OUT=size_out, SIZE_IN=size_in, PART=part, SPLIT=split,
        ROWS=max(16, triton.next_power_of_2(rows)), TILE_OUT=shape.tile_out, TILE_IN=shape.tile_in,
        NORM=norm_weight is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATED=gated,
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return out


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counters_ptr,
    rows, eps, x_stride,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    r = tl.arange(0, ROWS)
    r_ok = r < rows
    k = tl.arange(0, TILE_IN)
    weight_rows = weight_ptr + o.to(tl.int64)[:, None] * SIZE_IN
    acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    begin = split * PART
    for start in tl.range(begin, tl.minimum(begin + PART, SIZE_IN), TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w = tl.load(weight_rows + i[None, :], mask=o_ok[:, None] & i_ok[None, :], other=0.0)
        x = tl.load(x_ptr + r[None, :] * x_stride + i[:, None], mask=r_ok[None, :] & i_ok[:, None], other=0.0)
        if NORM:
            x32 = x.to(tl.float32)
            squares += tl.sum(x32 * x32, 0)
            x = (x32 * tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)[:, None]).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(
                weight_rows + SIZE_OUT * SIZE_IN + i[None, :], mask=o_ok[:, None] & i_ok[None, :], other=0.0
            )
            acc_up = tl.dot(w_up, x, acc_up, input_precision="ieee")

    if SPLIT > 1:
        # The last program to arrive adds the parts in order. The sum of squares travels as one more "output".
        slab = (split * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
        tl.store(partial_ptr + slab, acc, mask=o_ok[:, None])
        squares_base = partial_ptr + SPLIT * SIZE_OUT * ROWS
        if NORM:
            tl.store(squares_base + (tile * SPLIT + split) * ROWS + r, squares)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TILE_OUT, ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for s in tl.static_range(SPLIT):
            part_slab = (s * SIZE_OUT + o)[:, None] * ROWS + r[None, :]
            acc += tl.load(partial_ptr + part_slab, mask=o_ok[:, None], other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(squares_base + (tile * SPLIT + s) * ROWS + r, cache_modifier=".cg")

    if NORM:
        scale = 1.0 / tl.sqrt(squares / SIZE_IN + eps)
        acc = acc * scale[None, :]
        acc_up = acc_up * scale[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + o, mask=o_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    address = r[None, :] * SIZE_OUT + o[:, None]
    ok = r_ok[None, :] & o_ok[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + address, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=ok)
