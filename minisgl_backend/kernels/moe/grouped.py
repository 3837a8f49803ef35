"""Mixture of experts, in the Triton language: expert routing, and the experts' MLPs as two grouped GEMMs.

Nothing waits for the device. Pairs of (token, expert) are sorted by expert and cut into tiles (align.py). Only the
device knows the number of tiles, so the grid is made for the largest number possible and unused programs return at
once; hence it runs under CUDA graphs, in decode and in prefill. One token is computed by one_token.py, a few by
few_tokens.py, many by grouped_tma.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_columns
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import MAX_PDL_TOKENS, cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.moe.align import ALIGN_BLOCK, FEW_BLOCKS, align
from minisgl_backend.kernels.moe.choose import MAX_FEW_TOKENS, MIN_WIDE_PAIRS
from minisgl_backend.kernels.moe.tiles import pairs_of_tile, products, rows_of_weight, store_pairs, weighted
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory, stages_that_fit

MEAN_PAIRS = (12, 24, 48)  # pairs per expert: upper bounds of the ranges for which each tiling is best


def route(
    logits: torch.Tensor, experts_per_token: int, renormalize: bool, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `MixtureKernels.route`: logits [num_tokens, num_experts] -> ids int64, weights float32, best first."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, experts_per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, experts_per_token), dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        _route_kernel[(num_tokens,)](
            logits, ids, weights, logits.stride(0), EXPERTS=num_experts,
            EXPERTS_PADDED=next_power_of_2(num_experts), K=experts_per_token,
            K_PADDED=next_power_of_2(experts_per_token), RENORMALIZE=renormalize, num_warps=1,
            **pdl_options(pdl),
        )  # fmt: skip
    return ids, weights


@triton.jit
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, logits_stride,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_PADDED)
    logits = tl.load(logits_ptr + token * logits_stride + e, mask=e < EXPERTS, other=-float("inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0)
    j = tl.arange(0, K_PADDED)
    ids = tl.zeros([K_PADDED], tl.int32)
    weights = tl.zeros([K_PADDED], tl.float32)
    left = tl.where(e < EXPERTS, shares, -1.0)  # padding is below every share and never picked
    for choice in tl.static_range(K):
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)  # NaN must not lead out of bounds
        ids = tl.where(j == choice, best, ids)
        weights = tl.where(j == choice, tl.max(left, 0), weights)
        left = tl.where(e == best, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + token * K + j, ids.to(tl.int64), mask=j < K)
    tl.store(weights_ptr + token * K + j, weights, mask=j < K)


def token_counts(num_experts: int, experts_per_token: int) -> tuple[int, ...]:
    """Token counts, ascending: each the smallest for which a mixture launches kernels that fewer tokens do not need."""
    pairs = [mean * num_experts for mean in (*MEAN_PAIRS, MIN_WIDE_PAIRS)] + [FEW_BLOCKS * ALIGN_BLOCK]
    last = {MAX_FEW_TOKENS, MAX_PDL_TOKENS, *(count // experts_per_token for count in pairs)}
    return tuple(sorted(count + 1 for count in last))


@dataclass(frozen=True)
class MoeShape:
    """Tilings of the two GEMMs. `gate_up` and `down`: (outputs per tile, inputs per step, warps, stages)."""

    tile_pairs: int
    gate_up: tuple[int, int, int, int]  # the first counts outputs after gating; there are twice as many weight rows
    down: tuple[int, int, int, int]


def moe_shape(pairs: int, num_experts: int, element_size: int = 2, shared: int = LARGEST) -> MoeShape:
    """The tiling that was measured best on an H200 (128 experts of 2,048 x 768, 8 per token), by the pairs per expert.

    It has fewer stages where numbers of element_size bytes would need more than `shared` bytes of shared memory.
    """
    shape = _measured_shape(pairs, num_experts)

    def fitted(cut: tuple[int, int, int, int], tiles: int) -> tuple[int, int, int, int]:
        tile_out, tile_in, num_warps, num_stages = cut
        stage_bytes = element_size * tile_in * (shape.tile_pairs + tiles * tile_out)
        return tile_out, tile_in, num_warps, stages_that_fit(num_stages, stage_bytes, shared)

    return MoeShape(shape.tile_pairs, fitted(shape.gate_up, 2), fitted(shape.down, 1))


def _measured_shape(pairs: int, num_experts: int) -> MoeShape:
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if pairs <= few:
        return MoeShape(16, (32, 128, 4, 4), (64, 128, 4, 4))
    if pairs <= some:
        return MoeShape(32, (64, 128, 4, 3), (128, 128, 4, 3))
    if pairs <= many:
        return MoeShape(64, (64, 64, 4, 4), (128, 64, 4, 4))
    return MoeShape(128, (128, 64, 8, 4), (256, 64, 8, 4))


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    *,
    shape: MoeShape | None = None,
    pdl: bool = False,
    biases: tuple[torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, see `MixtureKernels.moe`.

    x [num_tokens, hidden], expert_ids int64 [num_tokens, k], expert_weights float32 [num_tokens, k],
    gate_up [num_experts, 2 * size, hidden], down [num_experts, hidden, size] -> [num_tokens, hidden].
    pdl: programmatic dependent launch, whose rules are in linear/small_rows.py.
    """
    num_experts, hidden, size = down.shape
    k = expert_ids.shape[1]
    pairs = expert_ids.numel()
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)  # by pair
    inner, outer = biases or (None, None)
    shape = shape or moe_shape(pairs, num_experts, x.element_size(), shared_memory(x.device))
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    count = tiles.expert.numel()
    arguments = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    tile_out, tile_in, num_warps, num_stages = shape.gate_up
    _grouped_kernel[(count, cdiv(size, tile_out))](
        x, gate_up, activated, gate_up if inner is None else inner, *arguments, x.stride(0),
        K=k, SIZE_OUT=size, SIZE_IN=hidden, TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in,
        GATED=True, ACTIVATION=activation, BIAS=inner is not None, num_warps=num_warps, num_stages=num_stages,
        **pdl_options(pdl),
    )  # fmt: skip
    tile_out, tile_in, num_warps, num_stages = shape.down
    _grouped_kernel[(count, cdiv(hidden, tile_out))](
        activated, down, result, down if outer is None else outer, *arguments, activated.stride(0),
        K=k, SIZE_OUT=hidden, SIZE_IN=size, TILE_PAIRS=shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in,
        GATED=False, ACTIVATION=None, BIAS=outer is not None, num_warps=num_warps, num_stages=num_stages,
        **pdl_options(pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


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
    acc = products(x_ptr, source, i_ok, x_stride, weight_ptr, weight_row, row_ok, SIZE_IN, TILE_IN, False)
    if BIAS:
        acc += tl.load(bias_ptr + weight_row, mask=row_ok, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc, target = gate_mul_columns(acc, ACTIVATION), i
    else:
        acc, target = weighted(acc, pair_weight_ptr, pair, i_ok, True), pair
    store_pairs(acc, out_ptr, target, i_ok, o, SIZE_OUT, True)
