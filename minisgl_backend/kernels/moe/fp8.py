"""Mixtures of experts with FP8 weights, in the Triton language: grouped.py's two GEMMs, of FP8 numbers.

Separate kernels quantize the tokens once, and the activations between the GEMMs. With few pairs per expert the weights
are the left operand of the tensor cores, whose tiles have at least 64 rows; with many pairs, the pairs are.
`pdl`: programmatic dependent launch, whose rules are in linear/small_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import cdiv, pdl_options
from minisgl_backend.kernels.linear.fp8_quantize import quantize_groups, quantize_tokens
from minisgl_backend.kernels.moe.align import Tiles, align
from minisgl_backend.kernels.moe.grouped import MoeShape
from minisgl_backend.kernels.moe.tiles import pairs_of_tile, store_pairs, weighted
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit

MANY_PAIRS = 64  # pairs of a tile from which on they are the left operand
Cut = tuple[int, int, int, int]  # outputs per tile, inputs per step, warps, stages
Block = tuple[int, int]
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # x -> numbers, and a scale for each row


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
    x_scales: torch.Tensor | None = None,
    blocks: tuple[Block, Block] | None = None,
    *,
    shape: MoeShape | None = None,
    quantize: Quantize | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See `Fp8MixtureKernels.moe`; nothing waits for the device.

    quantize: quantizes activations, where weights have another one-byte dtype, with a scale for each output.
    """
    (num_experts, hidden, size), k, pairs = down.shape, expert_ids.shape[1], expert_ids.numel()
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    shape = shape or fp8_shape(pairs, num_experts, shared_memory(x.device))
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    before, between = (None, None) if x_scales is None else x_scales.unbind()
    of_gate_up, of_down = blocks or (None, None)
    shares = expert_weights.contiguous()
    _gemm(x, gate_up, gate_up_scale, activated, tiles, shares, k, shape, shape.gate_up, before, of_gate_up, activation,
          quantize, pdl)  # fmt: skip
    _gemm(activated, down, down_scale, result, tiles, shares, k, shape, shape.down, between, of_down, None, quantize,
          pdl)  # fmt: skip
    return combine(result, k, residual, pdl)


def fp8_shape(pairs: int, num_experts: int, shared: int) -> MoeShape:
    """The tiling by the pairs of an expert. Up to 64 pairs as measured on an H100 (128 experts of 2,048 x 768, 8 per
    token); for more, tiles whose accumulators fit into registers."""
    mean = pairs / num_experts
    if mean <= 32:
        tile_pairs, gate_up_out, down_out, warps = 16 if mean <= 16 else 32, 64, 64, 4
    else:
        tile_pairs, gate_up_out, down_out, warps = (64, 64, 128, 4) if mean <= 96 else (128, 64, 128, 8)

    def cut(tile_out: int, tiles: int) -> Cut:
        return tile_out, 128, warps, stages_that_fit(4, 128 * (tile_pairs + tiles * tile_out), shared)

    return MoeShape(tile_pairs, cut(gate_up_out, 2), cut(down_out, 1))


def _gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    tiles: Tiles,
    shares: torch.Tensor,
    k: int,
    shape: MoeShape,
    cut: Cut,
    x_scale: torch.Tensor | None,
    block: Block | None,
    activation: str | None,
    quantize: Quantize | None,
    pdl: bool,
) -> None:
    """Quantizes x, then one of the two GEMMs: with an activation that with gate_up, else that with down."""
    tile_out, tile_in, num_warps, num_stages = cut
    block_out, block_in = block or (0, 0)
    if quantize is not None:
        numbers, scales = quantize(x)
    elif block is None:
        numbers, scales = quantize_tokens(x, pdl=pdl, x_scale=x_scale)
    else:
        numbers, scales = quantize_groups(x, block_in, pdl=pdl)
        tile_in = min(tile_in, block_in)
    kernel = _many_pairs_kernel if shape.tile_pairs >= MANY_PAIRS else _few_pairs_kernel
    size_out, size_in = out.shape[1], x.shape[1]
    kernel[(tiles.expert.numel(), cdiv(size_out, tile_out))](
        numbers, scales, weight, scale, out, tiles.order, tiles.expert, tiles.first, tiles.end, shares, len(x), K=k,
        SIZE_OUT=size_out, SIZE_IN=size_in, TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, GATED=activation is not None, ACTIVATION=activation,
        num_warps=num_warps, num_stages=num_stages, **pdl_options(pdl),
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
    w_scales = _scales_of(scale_ptr, expert, o, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    up_scales = _scales_of(scale_ptr, expert, o + SIZE_OUT, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
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
    w_scales = _scales_of(scale_ptr, expert, row, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    up_scales = _scales_of(scale_ptr, expert, row + SIZE_OUT, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
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


@triton.jit
def _scales_of(
    scale_ptr, expert, row, OUTPUTS: tl.constexpr, SIZE_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Scales of rows of an expert's weight: those of their first block of inputs, or one per row."""
    if BLOCK_IN:
        groups: tl.constexpr = (SIZE_IN + BLOCK_IN - 1) // BLOCK_IN
        blocks: tl.constexpr = (OUTPUTS + BLOCK_OUT - 1) // BLOCK_OUT
        return scale_ptr + (expert * blocks + row // BLOCK_OUT) * groups
    else:
        return scale_ptr + expert * OUTPUTS + row
