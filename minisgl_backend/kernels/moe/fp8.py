"""Mixtures of experts with FP8 weights, in the Triton language: grouped.py's two GEMMs, of FP8 numbers.

Tokens are quantized once, and what is between the GEMMs again, by kernels of their own. With many pairs an expert the
matrix units multiply FP8; with few the weights become float16 in registers, since tiles are too small for those.
`pdl`: programmatic dependent launch, whose rules stand in linear/small_rows.py. None of this was measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import activate
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.fp8 import quantize_tokens
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.grouped import MoeShape, moe_shape
from minisgl_backend.kernels.shared_memory import shared_memory

NATIVE_PAIRS = 64  # of a tile, from which on the matrix units multiply FP8


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    shape: MoeShape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Fp8Kernels.moe`'s; nothing waits for the device."""
    (num_experts, hidden, size), k, pairs = down.shape, expert_ids.shape[1], expert_ids.numel()
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    shape = shape or moe_shape(pairs, num_experts, 2, shared_memory(x.device))
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    shared = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    native = shape.tile_pairs >= NATIVE_PAIRS
    tile_out, tile_in, num_warps, num_stages = shape.gate_up
    count = tiles.expert.numel()
    _grouped_kernel[(count, triton.cdiv(size, tile_out))](
        *quantize_tokens(x, pdl=pdl), gate_up, gate_up_scale, activated, *shared, K=k, SIZE_OUT=size, SIZE_IN=hidden,
        TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in, GATED=True, ACTIVATION=activation,
        NATIVE=native, num_warps=num_warps, num_stages=num_stages, **pdl_options(pdl),
    )  # fmt: skip
    tile_out, tile_in, num_warps, num_stages = shape.down
    _grouped_kernel[(count, triton.cdiv(hidden, tile_out))](
        *quantize_tokens(activated, pdl=pdl), down, down_scale, result, *shared, K=k, SIZE_OUT=hidden, SIZE_IN=size,
        TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in, GATED=False, ACTIVATION=None,
        NATIVE=native, num_warps=num_warps, num_stages=num_stages, **pdl_options(pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


@triton.jit
def _grouped_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: activation(x @ gate.T) * (x @ up.T), read by token and written in sorted order. Else: read in sorted
    order, written by pair and multiplied by the pair's weight."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    i = tl.load(first_ptr + tile) + tl.arange(0, TILE_PAIRS)
    i_ok = i < tl.load(end_ptr + tile)
    pair = tl.load(order_ptr + i, mask=i_ok, other=0)
    source = pair // K if GATED else i
    o = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    if GATED:
        # One GEMM for both halves: the first TILE_OUT columns are gate rows, the others the same up rows.
        c = tl.arange(0, 2 * TILE_OUT)
        column = tl.program_id(1) * TILE_OUT + c % TILE_OUT
        column_ok = column < SIZE_OUT
        weight_row = expert * (2 * SIZE_OUT) + column + (c // TILE_OUT) * SIZE_OUT
        acc = tl.zeros([TILE_PAIRS, 2 * TILE_OUT], tl.float32)
    else:
        column_ok = o < SIZE_OUT
        weight_row = expert * SIZE_OUT + o
        acc = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    k = tl.arange(0, TILE_IN)
    x_rows = x_ptr + source.to(tl.int64)[:, None] * SIZE_IN
    weight_rows = weight_ptr + weight_row[None, :] * SIZE_IN
    for start in tl.range(0, SIZE_IN, TILE_IN):
        j = start + k
        j_ok = j < SIZE_IN
        x = tl.load(x_rows + j[None, :], mask=i_ok[:, None] & j_ok[None, :], other=0.0)
        w = tl.load(weight_rows + j[:, None], mask=j_ok[:, None] & column_ok[None, :], other=0.0)
        if NATIVE:
            acc += tl.dot(x, w)  # the units sum FP8 with fewer bits than float32: one tile at a time
        else:
            acc = tl.dot(x.to(tl.float16), w.to(tl.float16), acc)
    x_scale = tl.load(x_scale_ptr + source, mask=i_ok, other=0.0)
    w_scale = tl.load(scale_ptr + weight_row, mask=column_ok, other=0.0)
    acc = acc * x_scale[:, None] * w_scale[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (TILE_PAIRS, 2, TILE_OUT)), (0, 2, 1)))
        acc = activate(gate, ACTIVATION) * up
        target = i
    else:
        acc = acc * tl.load(pair_weight_ptr + pair, mask=i_ok, other=0.0).to(tl.float32)[:, None]
        target = pair
    address = target.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=i_ok[:, None] & (o < SIZE_OUT)[None, :])
