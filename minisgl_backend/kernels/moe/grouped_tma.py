"""The grouped GEMMs of a mixture of experts for many tokens, compute-bound, with tensor memory access (TMA).

With TMA descriptors of the weights, and of the activations between the two GEMMs, one instruction of one thread loads a
whole tile to shared memory. Programs are persistent; in the GEMM with down, the loads of the next tile begin before the
previous one's results are stored. All columns of one tile of pairs are consecutive, so that the rows which they share
come from the L2 cache. Where at most half a tile of an expert's pairs is left, half a tile is computed. Results stay in
sorted order until they are summed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.moe.align import Tiles, align
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.choose import WIDE_TILE_IN
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, GemmShape, MixtureShape, Pairs, outputs_of_pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import store_pairs

TILE_PAIRS = 128


SHAPE = MixtureShape(TILE_PAIRS, GemmShape(128, WIDE_TILE_IN, 8, 4), GemmShape(256, WIDE_TILE_IN, 8, 4))


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[torch.Tensor], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for the cases that moe/choose.py gives to this file."""
    x, (ids, weights) = kernels.picked(x, experts, call)
    k, tiles = ids.shape[1], align(ids.contiguous(), experts.num_experts, TILE_PAIRS)
    pairs = Pairs(tiles, weights.contiguous(), k, TILE_PAIRS, False)
    result = outputs_of_pairs(x, experts, pairs, SHAPE, _gemm)  # in sorted order
    return combine(result, k, call.residual, place=tiles.place, weights=pairs.weights)


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    """Results are in sorted order, and so is the input of that with down: looking up pairs and their weights there
    would take a tenth of the time."""
    tiles, (_, size_out), cut, size_in = pairs.plan, gemm.out.shape, gemm.cut, gemm.x.shape[1]
    assert isinstance(tiles, Tiles)
    weight = _descriptor(gemm.weight.view(-1, size_in), cut.tile_out, cut.tile_in)
    bias = gemm.out if gemm.bias is None else gemm.bias
    programs = (_programs(gemm.out.device, pairs.num_tiles * cdiv(size_out, cut.tile_out)),)
    sizes = {
        "SIZE_OUT": size_out, "SIZE_IN": size_in, "TILE_PAIRS": TILE_PAIRS, "TILE_OUT": cut.tile_out,
        "TILE_IN": cut.tile_in, "BIAS": gemm.bias is not None, "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }  # fmt: skip
    if gemm.is_gated:
        _gate_up_kernel[programs](
            gemm.x, weight, gemm.out, bias, *pairs.tiles, tiles.used, gemm.x.stride(0), K=pairs.experts_per_token,
            ACTIVATION=gemm.activation, **sizes,
        )  # fmt: skip
        return
    _down_kernel[programs](
        _descriptor(gemm.x, TILE_PAIRS, cut.tile_in), weight, gemm.out, bias, tiles.expert, tiles.first, tiles.end,
        tiles.used, **sizes,
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
