"""The grouped GEMMs of a mixture of experts for many tokens, compute-bound, with tensor memory access (TMA).

With TMA descriptors of the weights, and of the activations between the two GEMMs, one instruction of one thread loads a
whole tile to shared memory. Programs are persistent; in the GEMM with down, the loads of the next tile begin before the
previous one's results are stored. All columns of one tile of pairs are consecutive, so that the rows which they share
come from the L2 cache. Where at most half a tile of an expert's pairs is left, half a tile is computed. Results stay in
sorted order until they are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.moe.align import Tiles, align
from minisgl_backend.kernels.moe.choose import WIDE_TILE_IN
from minisgl_backend.kernels.moe.tiles import store_pairs

TILE_PAIRS = 128


@dataclass(frozen=True)
class WideShape:
    """Tiling of one GEMM."""

    tile_out: int  # of the GEMM with gate and up: after gating
    tile_in: int
    num_warps: int
    num_stages: int


GATE_UP = WideShape(128, WIDE_TILE_IN, 8, 4)
DOWN = WideShape(256, WIDE_TILE_IN, 8, 4)


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """As `grouped.moe`, for the cases that moe/choose.py gives to this file."""
    (num_experts, hidden, size), k, pairs = down.shape, expert_ids.shape[1], expert_ids.numel()
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)  # in sorted order
    inner, outer = biases or (None, None)
    tiles = align(expert_ids.contiguous(), num_experts, TILE_PAIRS)
    gate_up_gemm(x, gate_up, activated, tiles, k, activation, bias=inner)
    down_gemm(activated, down, result, tiles, bias=outer)
    return combine(result, k, residual, place=tiles.place, weights=expert_weights.contiguous())


def gate_up_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    k: int,
    activation: str = "silu",
    cut: WideShape = GATE_UP,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """out[i] = activation(gate @ x) * (up @ x) of the token and the expert of the i-th pair in sorted order.

    x [num_tokens, hidden], weight [num_experts, 2 * size, hidden], out [num_tokens * k, size],
    bias [num_experts, 2 * size].
    """
    num_experts, rows, hidden = weight.shape
    size = rows // 2
    descriptor = _descriptor(weight.view(num_experts * rows, hidden), cut.tile_out, cut.tile_in)
    _gate_up_kernel[(_programs(x.device, tiles.expert.numel() * cdiv(size, cut.tile_out)),)](
        x, descriptor, out, out if bias is None else bias, tiles.order, tiles.expert, tiles.first, tiles.end,
        tiles.used, x.stride(0), K=k, SIZE_OUT=size, SIZE_IN=hidden, TILE_PAIRS=TILE_PAIRS, TILE_OUT=cut.tile_out,
        TILE_IN=cut.tile_in, ACTIVATION=activation, BIAS=bias is not None, num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )  # fmt: skip


def down_gemm(
    activated: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    cut: WideShape = DOWN,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """out = down @ activated, both in sorted order: looking up pairs and their weights here would take a tenth of the
    time.

    activated [num_pairs, size], weight [num_experts, hidden, size], out [num_pairs, hidden], bias [num_experts,
    hidden].
    """
    num_experts, hidden, size = weight.shape
    descriptor = _descriptor(weight.view(num_experts * hidden, size), cut.tile_out, cut.tile_in)
    values = _descriptor(activated, TILE_PAIRS, cut.tile_in)
    _down_kernel[(_programs(out.device, tiles.expert.numel() * cdiv(hidden, cut.tile_out)),)](
        values, descriptor, out, out if bias is None else bias, tiles.expert, tiles.first, tiles.end, tiles.used,
        SIZE_OUT=hidden, SIZE_IN=size, TILE_PAIRS=TILE_PAIRS, TILE_OUT=cut.tile_out, TILE_IN=cut.tile_in,
        BIAS=bias is not None, num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """TMA descriptor of a matrix that is read in tiles of `rows` x `columns`."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # missing in older Tritons

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _programs(device: torch.device, tasks: int) -> int:
    """One program per multiprocessor: a tile takes most of its shared memory."""
    return min(tasks, DeviceFacts.of(device).multiprocessors or 4)


@triton.jit
def _gate_up_kernel(
    x_ptr, weight, out_ptr, bias_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, used_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (SIZE_OUT + TILE_OUT - 1) // TILE_OUT
    tasks = tl.load(used_ptr) * columns
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0)):
        tile = task // columns
        column = (task % columns) * TILE_OUT
        gate_row = tl.load(expert_ptr + tile) * (2 * SIZE_OUT) + column
        first, end = tl.load(first_ptr + tile), tl.load(end_ptr + tile)
        if end - first > TILE_PAIRS // 2:
            _gate_up_tile(
                x_ptr, weight, out_ptr, bias_ptr, order_ptr, x_stride, gate_row, column, first, end,
                K, SIZE_OUT, SIZE_IN, TILE_PAIRS, TILE_OUT, TILE_IN, ACTIVATION, BIAS,
            )  # fmt: skip
        else:  # the last tile of an expert
            _gate_up_tile(
                x_ptr, weight, out_ptr, bias_ptr, order_ptr, x_stride, gate_row, column, first, end,
                K, SIZE_OUT, SIZE_IN, TILE_PAIRS // 2, TILE_OUT, TILE_IN, ACTIVATION, BIAS,
            )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x_ptr, weight, out_ptr, bias_ptr, order_ptr, x_stride, gate_row, column, first, end,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, TILE_PAIRS)
    i_ok = i < end
    token = tl.load(order_ptr + i, mask=i_ok, other=0) // K
    x_rows = x_ptr + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, TILE_IN)[None, :]
    gate = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    up = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    for start in range(0, SIZE_IN, TILE_IN):
        x = tl.load(x_rows + start)
        w_gate = weight.load([gate_row, start])
        w_up = weight.load([gate_row + SIZE_OUT, start])
        gate = tl.dot(x, w_gate.T, gate, input_precision="ieee")
        up = tl.dot(x, w_up.T, up, input_precision="ieee")
    o = column + tl.arange(0, TILE_OUT)
    if BIAS:
        b = bias_ptr + gate_row + tl.arange(0, TILE_OUT)
        gate += tl.load(b, mask=o < SIZE_OUT, other=0.0).to(tl.float32)[None, :]
        up += tl.load(b + SIZE_OUT, mask=o < SIZE_OUT, other=0.0).to(tl.float32)[None, :]
    store_pairs(gate_mul(gate, up, ACTIVATION), out_ptr, i, i_ok, o, SIZE_OUT, True)


@triton.jit
def _down_kernel(
    values, weight, out_ptr, bias_ptr, expert_ptr, first_ptr, end_ptr, used_ptr,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (SIZE_OUT + TILE_OUT - 1) // TILE_OUT
    tasks = tl.load(used_ptr) * columns
    for task in tl.range(tl.program_id(0), tasks, tl.num_programs(0), flatten=True):
        tile = task // columns
        column = (task % columns) * TILE_OUT
        row = tl.load(expert_ptr + tile) * SIZE_OUT + column
        first, end = tl.load(first_ptr + tile), tl.load(end_ptr + tile)
        acc = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
        for start in range(0, SIZE_IN, TILE_IN):
            x = values.load([first, start])
            w = weight.load([row, start])
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        i = first + tl.arange(0, TILE_PAIRS)
        o = column + tl.arange(0, TILE_OUT)
        if BIAS:
            acc += tl.load(bias_ptr + row + tl.arange(0, TILE_OUT), mask=o < SIZE_OUT, other=0.0).to(tl.float32)[
                None, :
            ]
        store_pairs(acc, out_ptr, i, i < end, o, SIZE_OUT, True)
