"""Mixtures of experts with 4-bit weights, in the Triton language: few_tokens.py's and grouped.py's two GEMMs.

The same plans say which pairs of (token, expert) a tile holds; a tile is computed by `step_product`.
`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_rows
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.int4.few_rows import (
    planes_together,
    scales_of,
    step_product,
    uses_assembly,
    words_of,
)
from minisgl_backend.kernels.linear.int4.reference import MIDDLE, Int4Weight
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.few_plan import SLOTS, Plan, read_tile
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, MixtureShape, Pairs, by_plan, by_sorted_pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import store_pairs, weighted


class Int4Cut(NamedTuple):
    """Tiling of one GEMM: see `linear.int4.Int4Shape`. tile_out: outputs after gating."""

    tile_out: int
    num_warps: int
    num_stages: int
    x_first: bool = False
    scaled: bool = False
    step: int = 32


ONE = MixtureShape(SLOTS, Int4Cut(32, 2, 4), Int4Cut(64, 2, 4))
FEW = MixtureShape(SLOTS, Int4Cut(32, 2, 3), Int4Cut(64, 2, 3))
_WIDE = (Int4Cut(64, 4, 2, scaled=True), Int4Cut(128, 4, 2, scaled=True))


def moe_shape(pairs: int, num_experts: int) -> MixtureShape[Int4Cut]:
    """The tiling that was best on an H100 (128 experts of 2,048 x 768), by the pairs per expert."""
    mean = pairs / num_experts
    if mean <= 12:
        return FEW
    return MixtureShape(32 if mean <= 96 else 64, *_WIDE)


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Int4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`."""
    x, picked = kernels.picked(x, experts, call)
    shape = moe_shape(picked.ids.numel(), experts.num_experts)
    pdl = kernels.ops.moe_pdl(x)
    return by_sorted_pairs(x, experts, picked, call.residual, shape=shape, gemm=_gemm, pdl=pdl)


def mixture_of_few(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Int4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for up to MAX_FEW_TOKENS tokens."""
    return by_plan(kernels, x, experts, call, ONE if len(x) == 1 else FEW, _gemm)


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    weight, cut, (_, size_out), plan = gemm.weight, gemm.cut, gemm.out.shape, pairs.plan
    if isinstance(plan, Plan):
        tiles, kind = (plan.tiles,) * 4, "packed" if plan.is_packed else "few"
    else:
        tiles, kind = pairs.tiles, "sorted"
    _experts_kernel[(pairs.num_tiles, cdiv(size_out, cut.tile_out))](
        gemm.x, weight.words, weight.scales, weight.words if weight.zeros is None else weight.zeros, gemm.out, *tiles,
        pairs.weights, gemm.x.stride(0), PLAN=kind, SIZE_OUT=size_out, SIZE_IN=weight.size_in,
        WORDS=weight.words.shape[-1], GROUPS=weight.scales.shape[-2], GROUP=weight.group, PLANE=weight.plane,
        STEP=min(cut.step, weight.plane), TOGETHER=planes_together(weight), ROWS=pairs.tile_pairs,
        TILE_OUT=cut.tile_out, X_FIRST=cut.x_first, SCALED=cut.scaled, ZEROS=weight.zeros is not None, MIDDLE=MIDDLE,
        ASM=uses_assembly(gemm.x), **gemm.options(pairs),
    )  # fmt: skip


@triton.jit
def _pairs_of(
    order_ptr, expert_ptr, first_ptr, end_ptr, PLAN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """This program's tile: the expert (negative: none), its pairs [ROWS], which of them are valid, and the row of each
    (sorted order, or number of the pair). See `few_plan.Plan` and `align.Tiles`."""
    tile = tl.program_id(0)
    if PLAN == "sorted":
        s = tl.arange(0, ROWS)  # comes first, unlike in `pairs_of_tile`: otherwise the machine code would differ
        expert = tl.load(expert_ptr + tile).to(tl.int64)
        place = tl.load(first_ptr + tile) + s
        ok = place < tl.load(end_ptr + tile)
        pair = tl.load(order_ptr + place, mask=ok, other=0)
    else:
        expert, pair, ok = read_tile(order_ptr, tile, tl.num_programs(0), K, ROWS, PLAN == "packed")
        place = pair
    return expert, pair, ok, place


@triton.jit
def _experts_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weights_ptr,
    x_stride,
    K: tl.constexpr, PLAN: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, WORDS: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, PLANE: tl.constexpr, STEP: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, TILE_OUT: tl.constexpr, X_FIRST: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: activation(x @ gate.T) * (x @ up.T), with x of the pair's token. Else: x @ down.T, with x of the pair,
    times the pair's weight."""
    if PDL:
        if PLAN == "sorted":
            tl_cuda.gdc_launch_dependents()
            tl_cuda.gdc_wait()
        else:  # as in few_tokens.py: the second GEMM reads the plan before it waits
            if GATED:
                tl_cuda.gdc_wait()
            tl_cuda.gdc_launch_dependents()
    expert, pair, ok, place = _pairs_of(order_ptr, expert_ptr, first_ptr, end_ptr, PLAN, K, ROWS)
    if expert < 0:
        return
    TILE: tl.constexpr = 2 * TILE_OUT if GATED else TILE_OUT
    WIDTH: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    j = tl.arange(0, TILE)
    column = tl.program_id(1) * TILE_OUT + j % TILE_OUT
    column_ok = column < SIZE_OUT
    row = column + j // TILE_OUT * SIZE_OUT
    c = tl.arange(0, STEP)
    word_rows = words_ptr + (expert * WIDTH + row) * WORDS
    if X_FIRST:
        word_rows, word_c, word_ok = word_rows[None, :], c[:, None], column_ok[None, :]
        acc = tl.zeros([ROWS, TILE], tl.float32)
    else:
        word_rows, word_c, word_ok = word_rows[:, None], c[None, :], column_ok[:, None]
        acc = tl.zeros([TILE, ROWS], tl.float32)
    scales_ptr += expert * (GROUPS * WIDTH)
    zeros_ptr += expert * (GROUPS * WIDTH)
    scales = scales_of(scales_ptr, zeros_ptr, row, column_ok, 0, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
    source = pair // K if GATED else place
    x_rows = x_ptr + source.to(tl.int64)[:, None] * x_stride
    if PDL and PLAN != "sorted" and not GATED:
        tl_cuda.gdc_wait()
    for at in tl.range(0, WORDS, STEP):
        words, odd = words_of(word_rows, word_c, word_ok, at, ASM)
        after = at + STEP
        after_ok = column_ok & (j * 0 + after < WORDS)
        following = scales_of(scales_ptr, zeros_ptr, row, after_ok, after, WIDTH, GROUP, PLANE, TOGETHER, ZEROS)
        acc = step_product(
            acc, words, odd, scales, x_rows, ok, at, SIZE_IN, PLANE, STEP, TOGETHER, X_FIRST, SCALED, ZEROS, MIDDLE,
            ASM,
        )  # fmt: skip
        scales = following
    if X_FIRST:
        acc = tl.trans(acc)
    o = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    if GATED:
        acc, target = gate_mul_rows(acc, ACTIVATION), place
    else:
        acc, target = weighted(acc, pair_weights_ptr, pair, ok, False), pair
    store_pairs(acc, out_ptr, target, ok, o, SIZE_OUT, False)
