"""A mixture of experts for a few tokens (a decode step of 2 to 64), in the Triton language: bound by reading the
weights of the experts picked, and by the starts and ends of its kernels.

The plan of few_plan.py, the two GEMMs and the sum.

`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py, with the exception of one_token.py: the
first GEMM lets the second start only after its own wait, so that the second may read the plan before it waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_columns
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.linear.fp8.scaled import Streamed, operand_of, scales_of
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.few_plan import SLOTS, Plan, read_tile
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, GemmShape, MixtureShape, Pairs, by_plan
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import products, rows_of_weight, store_pairs, weighted


def few_shape(num_tokens: int) -> MixtureShape[GemmShape]:
    """The tilings that were measured best on an H200, 8 of 128 experts of 2,048 x 768. Narrow tiles of gate_up win from
    3 tokens on, by 1 us per layer at 4 tokens and 2 us at 64."""
    gate_up = GemmShape(32, 128, 4, 4) if num_tokens <= 2 else GemmShape(16, 256, 2, 3)
    return MixtureShape(SLOTS, gate_up, GemmShape(64, 128, 4, 4))


# Of FP8: narrow tiles, since there are few (measured on an H100).
FEW_SCALED = MixtureShape(SLOTS, GemmShape(16, 128, 4, 5), GemmShape(32, 128, 4, 5))


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Streamed], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for up to MAX_FEW_TOKENS tokens (choose.py)."""
    is_plain = isinstance(experts.gate_up, torch.Tensor)
    return by_plan(kernels, x, experts, call, few_shape(len(x)) if is_plain else FEW_SCALED, _gemm)


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    plan, (_, size_out), cut = pairs.plan, gemm.out.shape, gemm.cut
    assert isinstance(plan, Plan)
    numbers, scale, weight_format = operand_of(gemm.weight)
    tile_in = min(cut.tile_in, weight_format["BLOCK_IN"] or cut.tile_in)
    _few_product_kernel[(plan.max_tiles, cdiv(size_out, cut.tile_out))](
        gemm.x, numbers, scale, gemm.x if gemm.bias is None else gemm.bias, gemm.out, plan.tiles, plan.weights,
        gemm.x.stride(0), SIZE_OUT=size_out, SIZE_IN=gemm.x.shape[1], TILE_OUT=cut.tile_out, TILE_IN=tile_in,
        BIAS=gemm.bias is not None, SLOTS=SLOTS, PACKED=plan.is_packed, **weight_format, **gemm.options(pairs),
    )  # fmt: skip


@triton.jit
def _few_product_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, tiles_ptr, pair_weights_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each pair. GATED: activation(gate @ x) * (up @ x), with x of the pair's token. Else: down @ x, with x of the
    pair, times the pair's weight."""
    if PDL:
        if GATED:
            tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert, pair, s_ok = read_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0), K, SLOTS, PACKED)
    if expert < 0:
        return
    o, weight_row, row_ok = rows_of_weight(expert, tl.program_id(1) * TILE_OUT, SIZE_OUT, TILE_OUT, GATED)
    source = pair // K if GATED else pair
    outputs: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    scale_at = scales_of(scale_ptr, expert, weight_row - expert * outputs, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    acc = products(
        x_ptr, source, s_ok, x_stride, weight_ptr, scale_at, weight_row, row_ok, SIZE_IN, TILE_IN, SCALED, BLOCK_IN,
        WAIT=PDL and not GATED,
    )  # fmt: skip
    if BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = gate_mul_columns(acc, ACTIVATION)
    else:
        acc = weighted(acc, pair_weights_ptr, pair, s_ok, True)
    store_pairs(acc, out_ptr, pair, s_ok, o, SIZE_OUT, True)
