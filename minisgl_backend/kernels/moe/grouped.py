"""Mixture of experts, in the Triton language: the experts' MLPs as two grouped GEMMs.

Nothing waits for the device. Pairs of (token, expert) are sorted by expert and cut into tiles (align.py). Only the
device knows the number of tiles, so the grid is made for the largest number possible and unused programs return at
once; hence it runs under CUDA graphs, in decode and in prefill. One token is computed by one_token.py, a few by
few_tokens.py, many by grouped_tma.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_columns
from minisgl_backend.kernels.launch import MAX_PDL_TOKENS, cdiv
from minisgl_backend.kernels.moe.align import ALIGN_BLOCK, FEW_BLOCKS
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.choose import MAX_FEW_TOKENS, MIN_WIDE_PAIRS
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, GemmShape, MixtureShape, Pairs, by_sorted_pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import pairs_of_tile, products, rows_of_weight, store_pairs, weighted
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory, stages_that_fit

MEAN_PAIRS = (12, 24, 48)  # pairs per expert: upper bounds of the ranges for which each tiling is best


def token_counts(num_experts: int, experts_per_token: int) -> tuple[int, ...]:
    """Token counts, ascending: each the smallest for which a mixture launches kernels that fewer tokens do not need."""
    pairs = [mean * num_experts for mean in (*MEAN_PAIRS, MIN_WIDE_PAIRS)] + [FEW_BLOCKS * ALIGN_BLOCK]
    last = {MAX_FEW_TOKENS, MAX_PDL_TOKENS, *(count // experts_per_token for count in pairs)}
    return tuple(sorted(count + 1 for count in last))


def moe_shape(pairs: int, num_experts: int, element_size: int = 2, shared: int = LARGEST) -> MixtureShape[GemmShape]:
    """The tiling that was measured best on an H200 (128 experts of 2,048 x 768, 8 per token), by the pairs per expert.

    It has fewer stages where numbers of element_size bytes would need more than `shared` bytes of shared memory.
    """
    shape = _measured_shape(pairs, num_experts)

    def fitted(cut: GemmShape, tiles: int) -> GemmShape:
        stage_bytes = element_size * cut.tile_in * (shape.tile_pairs + tiles * cut.tile_out)
        return cut._replace(num_stages=stages_that_fit(cut.num_stages, stage_bytes, shared))

    return MixtureShape(shape.tile_pairs, fitted(shape.gate_up, 2), fitted(shape.down, 1))


def _measured_shape(pairs: int, num_experts: int) -> MixtureShape[GemmShape]:
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if pairs <= few:
        return MixtureShape(16, GemmShape(32, 128, 4, 4), GemmShape(64, 128, 4, 4))
    if pairs <= some:
        return MixtureShape(32, GemmShape(64, 128, 4, 3), GemmShape(128, 128, 4, 3))
    if pairs <= many:
        return MixtureShape(64, GemmShape(64, 64, 4, 4), GemmShape(128, 64, 4, 4))
    return MixtureShape(128, GemmShape(128, 64, 8, 4), GemmShape(256, 64, 8, 4))


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[torch.Tensor], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`."""
    x, picked = kernels.picked(x, experts, call)
    shape = moe_shape(picked.ids.numel(), experts.num_experts, x.element_size(), shared_memory(x.device))
    pdl = kernels.ops.moe_pdl(x)
    return by_sorted_pairs(x, experts, picked, call.residual, shape=shape, gemm=_gemm, pdl=pdl)


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    (_, size_out), cut = gemm.out.shape, gemm.cut
    _grouped_kernel[(pairs.num_tiles, cdiv(size_out, cut.tile_out))](
        gemm.x, gemm.weight, gemm.out, gemm.weight if gemm.bias is None else gemm.bias, *pairs.tiles, pairs.weights,
        gemm.x.stride(0), SIZE_OUT=size_out, SIZE_IN=gemm.x.shape[1], TILE_PAIRS=pairs.tile_pairs,
        TILE_OUT=cut.tile_out, TILE_IN=cut.tile_in, BIAS=gemm.bias is not None, **gemm.options(pairs),
    )  # fmt: skip


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, out_ptr, bias_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
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
    pair, i, i_ok = pairs_of_tile(order_ptr, first_ptr, end_ptr, tile, TILE_PAIRS)
    source = pair // K if GATED else i
    o, weight_row, row_ok = rows_of_weight(expert, tl.program_id(1) * TILE_OUT, SIZE_OUT, TILE_OUT, GATED)
    acc = products(
        x_ptr, source, i_ok, x_stride, weight_ptr, weight_ptr, weight_row, row_ok, SIZE_IN, TILE_IN, False, 0, False
    )
    if BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc, target = gate_mul_columns(acc, ACTIVATION), i
    else:
        acc, target = weighted(acc, pair_weight_ptr, pair, i_ok, True), pair
    store_pairs(acc, out_ptr, target, i_ok, o, SIZE_OUT, True)
