"""Mixtures of experts with FP8 weights, or of INT8, in the Triton language: grouped.py's two GEMMs, of such numbers.

Separate kernels quantize the tokens once, and the activations between the GEMMs. With few pairs per expert the weights
are the left operand of the tensor cores, whose tiles have at least 64 rows; with many pairs, the pairs are.
`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.fp8.quantize import quantize_groups, quantize_tokens
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight
from minisgl_backend.kernels.linear.fp8.scaled import scales_of
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.linear.int8 import quantize_tokens as quantize_to_int8
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked, Weight
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, GemmShape, Launch, MixtureShape, Pairs, by_sorted_pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import pairs_of_tile, store_pairs, weighted
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit

MANY_PAIRS = 64  # pairs of a tile from which on they are the left operand


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Fp8Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`."""
    x, picked = kernels.picked(x, experts, call)
    return _of_picked(x, experts, picked, call.residual, _gemm, kernels.ops.moe_pdl(x))


def mixture_int8(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Int8Weight], call: MixtureCall
) -> torch.Tensor:
    """Of INT8 weights, by the same kernels: they load numbers of one byte and multiply each output by its scale;
    integers are accumulated as integers within a tile. Not tuned: activations are quantized by torch."""
    x, picked = kernels.picked(x, experts, call)
    return _of_picked(x, experts, picked, call.residual, _int8_gemm, False)


def _of_picked(
    x: torch.Tensor,
    experts: Experts[Weight],
    picked: Picked,
    residual: torch.Tensor | None,
    gemm: Launch,
    pdl: bool,
) -> torch.Tensor:
    shape = fp8_shape(picked.ids.numel(), experts.num_experts, shared_memory(x.device))
    return by_sorted_pairs(x, experts, picked, residual, shape=shape, gemm=gemm, pdl=pdl)


def fp8_shape(pairs: int, num_experts: int, shared: int) -> MixtureShape[GemmShape]:
    """The tiling by the pairs of an expert. Up to 64 pairs as measured on an H100 (128 experts of 2,048 x 768, 8 per
    token); for more, tiles whose accumulators fit into registers."""
    mean = pairs / num_experts
    if mean <= 32:
        tile_pairs, gate_up_out, down_out, warps = 16 if mean <= 16 else 32, 64, 64, 4
    else:
        tile_pairs, gate_up_out, down_out, warps = (64, 64, 128, 4) if mean <= 96 else (128, 64, 128, 8)

    def cut(tile_out: int, tiles: int) -> GemmShape:
        return GemmShape(tile_out, 128, warps, stages_that_fit(4, 128 * (tile_pairs + tiles * tile_out), shared))

    return MixtureShape(tile_pairs, cut(gate_up_out, 2), cut(down_out, 1))


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    """Quantizes x, and multiplies."""
    weight: Fp8Weight = gemm.weight
    if weight.block is None:
        _launch(gemm, pairs, quantize_tokens(gemm.x, pdl=pairs.pdl, x_scale=weight.x_scale), (0, 0))
    else:
        _launch(gemm, pairs, quantize_groups(gemm.x, weight.block[1], pdl=pairs.pdl), weight.block)


def _int8_gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    _launch(gemm, pairs, quantize_to_int8(gemm.x), (0, 0))


def _launch(
    gemm: ExpertsGemm, pairs: Pairs, quantized: tuple[torch.Tensor, torch.Tensor], block: tuple[int, int]
) -> None:
    """quantized: x, and its scales."""
    weight, cut, (_, size_out), (block_out, block_in) = gemm.weight, gemm.cut, gemm.out.shape, block
    tile_in = min(cut.tile_in, block_in) if block_in else cut.tile_in
    kernel = _many_pairs_kernel if pairs.tile_pairs >= MANY_PAIRS else _few_pairs_kernel
    kernel[(pairs.num_tiles, cdiv(size_out, cut.tile_out))](
        *quantized, weight.numbers, weight.scale, gemm.out, *pairs.tiles, pairs.weights, len(gemm.x),
        SIZE_OUT=size_out, SIZE_IN=gemm.x.shape[1], TILE_PAIRS=pairs.tile_pairs, TILE_OUT=cut.tile_out, TILE_IN=tile_in,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, **gemm.options(pairs),
    )  # fmt: skip


@triton.jit(do_not_specialize=["x_rows"])
def _few_pairs_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr,
    x_rows,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_many_pairs_kernel`."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair, i, i_ok = pairs_of_tile(order_ptr, first_ptr, end_ptr, tile, TILE_PAIRS)
    source = pair // K if GATED else i
    o = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    outputs: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    k = tl.arange(0, TILE_IN)
    x_lines = x_ptr + source.to(tl.int64)[:, None] * SIZE_IN
    weight_rows = weight_ptr + (expert * outputs + o)[:, None] * SIZE_IN
    w_scales = scales_of(scale_ptr, expert, o, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    up_scales = scales_of(scale_ptr, expert, o + SIZE_OUT, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    acc = tl.zeros([TILE_OUT, TILE_PAIRS], tl.float32)
    acc_up = tl.zeros([TILE_OUT, TILE_PAIRS], tl.float32)
    x_scale = tl.load(x_scale_ptr + source, mask=i_ok, other=0.0)
    w_scale = tl.load(w_scales, mask=o_ok, other=0.0)
    if GATED:
        up_scale = tl.load(up_scales, mask=o_ok, other=0.0)
    for start in tl.range(0, SIZE_IN, TILE_IN):
        j = start + k
        j_ok = j < SIZE_IN
        w_ok = o_ok[:, None] & j_ok[None, :]
        x = tl.trans(tl.load(x_lines + j[None, :], mask=i_ok[:, None] & j_ok[None, :], other=0.0))
        w = tl.load(weight_rows + j[None, :], mask=w_ok, other=0.0)
        if BLOCK_IN:
            acc += tl.dot(w, x) * (w_scale[:, None] * x_scale[None, :])
        else:
            acc += tl.dot(w, x)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + j[None, :], mask=w_ok, other=0.0)
            if BLOCK_IN:
                acc_up += tl.dot(w_up, x) * (up_scale[:, None] * x_scale[None, :])
            else:
                acc_up += tl.dot(w_up, x)
        if BLOCK_IN:  # scales of the next block, while its tiles are in flight
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN
            x_scale = tl.load(x_scale_ptr + g * x_rows + source, mask=i_ok, other=0.0)
            w_scale = tl.load(w_scales + g, mask=o_ok, other=0.0)
            if GATED:
                up_scale = tl.load(up_scales + g, mask=o_ok, other=0.0)
    if BLOCK_IN == 0:
        acc = acc * w_scale[:, None] * x_scale[None, :]
    if GATED:
        if BLOCK_IN == 0:
            acc_up = acc_up * up_scale[:, None] * x_scale[None, :]
        acc, target = gate_mul(acc, acc_up, ACTIVATION), i
    else:
        acc, target = weighted(acc, pair_weight_ptr, pair, i_ok, False), pair
    store_pairs(acc, out_ptr, target, i_ok, o, SIZE_OUT, False)


@triton.jit(do_not_specialize=["x_rows"])
def _many_pairs_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr,
    x_rows,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: activation(x @ gate.T) * (x @ up.T), read by token and written in sorted order. Else: read in sorted
    order, written by pair and multiplied by the pair's weight. x_rows: how many rows x has."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair, i, i_ok = pairs_of_tile(order_ptr, first_ptr, end_ptr, tile, TILE_PAIRS)
    source = pair // K if GATED else i
    column = tl.program_id(1) * TILE_OUT
    o = column + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    outputs: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    # Where a tile's outputs belong to one block, its scale is a scalar, which saves an operation per partial sum.
    one_block: tl.constexpr = BLOCK_IN > 0 and BLOCK_OUT % TILE_OUT == 0 and (not GATED or SIZE_OUT % TILE_OUT == 0)
    row = column if one_block else o
    k = tl.arange(0, TILE_IN)
    x_lines = x_ptr + source.to(tl.int64)[:, None] * SIZE_IN + k[None, :]
    weight_rows = weight_ptr + (expert * outputs + o)[:, None] * SIZE_IN + k[None, :]
    w_scales = scales_of(scale_ptr, expert, row, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    up_scales = scales_of(scale_ptr, expert, row + SIZE_OUT, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    acc = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    acc_up = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    x_scale = tl.load(x_scale_ptr + source, mask=i_ok, other=0.0)
    w_scale = tl.load(w_scales) if one_block else tl.load(w_scales, mask=o_ok, other=0.0)
    if GATED:
        up_scale = tl.load(up_scales) if one_block else tl.load(up_scales, mask=o_ok, other=0.0)
    for start in tl.range(0, SIZE_IN, TILE_IN):
        if SIZE_IN % TILE_IN == 0:
            x = tl.load(x_lines + start, mask=i_ok[:, None], other=0.0)
            w_ok = o_ok[:, None]
        else:
            j_ok = start + k < SIZE_IN
            x = tl.load(x_lines + start, mask=i_ok[:, None] & j_ok[None, :], other=0.0)
            w_ok = o_ok[:, None] & j_ok[None, :]
        w = tl.load(weight_rows + start, mask=w_ok, other=0.0)
        # Tensor cores accumulate FP8 with fewer bits than float32, so each tile is added up separately.
        acc = _add_scaled(acc, tl.dot(x, w.T), x_scale, w_scale, one_block, BLOCK_IN)
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + start, mask=w_ok, other=0.0)
            acc_up = _add_scaled(acc_up, tl.dot(x, w_up.T), x_scale, up_scale, one_block, BLOCK_IN)
        if BLOCK_IN:
            g = tl.minimum(start + TILE_IN, SIZE_IN - 1) // BLOCK_IN  # scales of the next tiles
            x_scale = tl.load(x_scale_ptr + g * x_rows + source, mask=i_ok, other=0.0)
            w_scale = tl.load(w_scales + g) if one_block else tl.load(w_scales + g, mask=o_ok, other=0.0)
            if GATED:
                up_scale = tl.load(up_scales + g) if one_block else tl.load(up_scales + g, mask=o_ok, other=0.0)
    if BLOCK_IN == 0:
        acc = acc * x_scale[:, None] * w_scale[None, :]
    if GATED:
        if BLOCK_IN == 0:
            acc_up = acc_up * x_scale[:, None] * up_scale[None, :]
        acc, target = gate_mul(acc, acc_up, ACTIVATION), i
    else:
        acc, target = weighted(acc, pair_weight_ptr, pair, i_ok, True), pair
    store_pairs(acc, out_ptr, target, i_ok, o, SIZE_OUT, True)


@triton.jit
def _add_scaled(acc, product, x_scale, w_scale, one_block: tl.constexpr, BLOCK_IN: tl.constexpr):
    if one_block:
        return acc + product * (x_scale * w_scale)[:, None]
    elif BLOCK_IN:
        return acc + product * (x_scale[:, None] * w_scale[None, :])
    else:
        return acc + product
