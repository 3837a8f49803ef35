"""Mixture of experts, in the Triton language: which experts a token takes, and their MLPs as two grouped GEMMs.

Nothing waits for the device. Pairs of (token, expert) are sorted by expert and cut into tiles that belong to one expert
each (vLLM and SGLang call it aligning to the block size). How many tiles there are is known on the device only, so the
grid has room for the most there can be and the rest return at once; hence it runs under CUDA graphs, in decode and in
prefill. Few pairs are not sorted: most have an expert of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

UNSORTED_PAIRS = 64  # at most; with 128 experts and uniform routing they name 50 different ones
ALIGN_BLOCK = 128  # pairs that one program counts and sorts
COMBINE_TILE = 1024


def route(logits: torch.Tensor, experts_per_token: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract is `Ops.route`'s: logits [num_tokens, num_experts] -> ids int64, weights float32, best first."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, experts_per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, experts_per_token), dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        _route_kernel[(num_tokens,)](
            logits, ids, weights, logits.stride(0), EXPERTS=num_experts,
            EXPERTS_PADDED=triton.next_power_of_2(num_experts), K=experts_per_token,
            K_PADDED=triton.next_power_of_2(experts_per_token), RENORMALIZE=renormalize, num_warps=1,
        )  # fmt: skip
    return ids, weights


@triton.jit
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, logits_stride,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_PADDED)
    logits = tl.load(logits_ptr + token * logits_stride + e, mask=e < EXPERTS, other=-float("inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0)
    j = tl.arange(0, K_PADDED)
    ids = tl.zeros([K_PADDED], tl.int32)
    weights = tl.zeros([K_PADDED], tl.float32)
    left = tl.where(e < EXPERTS, shares, -1.0)  # below every share, so that padding is never picked
    for choice in tl.static_range(K):
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)  # logits that are no numbers must not lead out of bounds
        ids = tl.where(j == choice, best, ids)
        weights = tl.where(j == choice, tl.max(left, 0), weights)
        left = tl.where(e == best, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + token * K + j, ids.to(tl.int64), mask=j < K)
    tl.store(weights_ptr + token * K + j, weights, mask=j < K)


@dataclass(frozen=True)
class MoeShape:
    """How the two GEMMs are cut. `gate_up` and `down`: (outputs a tile, inputs a step, warps, stages)."""

    tile_pairs: int
    gate_up: tuple[int, int, int, int]  # the first counts outputs after gating: gate and up rows are twice as many
    down: tuple[int, int, int, int]


def moe_shape(pairs: int, num_experts: int) -> MoeShape:
    """The cut that was measured best on an H200 (128 experts of 2,048 x 768, 8 a token), by the pairs of an expert."""
    if pairs <= 12 * num_experts:
        return MoeShape(16, (32, 128, 4, 4), (64, 128, 4, 4))
    if pairs <= 24 * num_experts:
        return MoeShape(32, (64, 128, 4, 3), (128, 128, 4, 3))
    if pairs <= 48 * num_experts:
        return MoeShape(64, (64, 64, 4, 4), (128, 64, 4, 4))
    return MoeShape(128, (128, 64, 8, 4), (256, 64, 8, 4))


@dataclass(frozen=True)
class _Tiles:
    """Which pairs each tile holds, on the device; int32."""

    order: torch.Tensor  # [num_pairs]  pairs sorted by expert, those of one expert by number
    expert: torch.Tensor  # [max_tiles]  of each tile; -1: not used
    first: torch.Tensor  # [max_tiles]  index into `order`
    end: torch.Tensor  # [max_tiles]


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor | None = None,
    shape: MoeShape | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts; the contract is `Ops.moe`'s.

    x [num_tokens, hidden], expert_ids int64 [num_tokens, k], expert_weights float32 [num_tokens, k],
    gate_up [num_experts, 2 * size, hidden], down [num_experts, hidden, size] -> [num_tokens, hidden].
    """
    num_tokens, hidden = x.shape
    num_experts, _, size = down.shape
    k = expert_ids.shape[1]
    pairs = num_tokens * k
    shape = shape or moe_shape(pairs, num_experts)
    ids = expert_ids.contiguous()
    few = pairs <= UNSORTED_PAIRS
    tiles = _Tiles(ids, ids, ids, ids) if few else _align(ids, num_experts, shape.tile_pairs)
    count = tiles.expert.numel()
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    arguments = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    tile_out, tile_in, num_warps, num_stages = shape.gate_up
    _grouped_kernel[(count, triton.cdiv(size, tile_out))](
        x, gate_up, activated, *arguments, x.stride(0), K=k, SIZE_OUT=size, SIZE_IN=hidden,
        TILE_PAIRS=16 if few else shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in, GATED=True, SORTED=not few,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    tile_out, tile_in, num_warps, num_stages = shape.down
    _grouped_kernel[(count, triton.cdiv(hidden, tile_out))](
        activated, down, result, *arguments, activated.stride(0), K=k, SIZE_OUT=hidden, SIZE_IN=size,
        TILE_PAIRS=16 if few else shape.tile_pairs, TILE_OUT=tile_out, TILE_IN=tile_in, GATED=False, SORTED=not few,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens > 0:
        _combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_TILE))](
            result, x if residual is None else residual, out, K=k, HIDDEN=hidden, TILE=COMBINE_TILE,
            RESIDUAL=residual is not None, num_warps=4,
        )  # fmt: skip
    return out


def _align(expert_ids: torch.Tensor, num_experts: int, tile_pairs: int) -> _Tiles:
    """Sorts pairs by expert in three launches: counts a block, where each block's pairs of an expert go, and there."""
    pairs, device = expert_ids.numel(), expert_ids.device
    blocks = triton.cdiv(pairs, ALIGN_BLOCK)
    most = min(pairs, pairs // tile_pairs + num_experts)
    experts_padded = triton.next_power_of_2(num_experts)
    counts = torch.empty((blocks, experts_padded), dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((3, most), dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](expert_ids, counts, pairs, BLOCK=ALIGN_BLOCK, EXPERTS_PADDED=experts_padded, num_warps=8)
    _layout_kernel[(1,)](
        counts, tiles, blocks, most, TILE_PAIRS=tile_pairs, EXPERTS_PADDED=experts_padded, ROWS=16, TILES=64,
        num_warps=8,
    )  # fmt: skip
    _order_kernel[(blocks,)](
        expert_ids, counts, order, pairs, BLOCK=ALIGN_BLOCK, EXPERTS_PADDED=experts_padded, num_warps=8
    )
    return _Tiles(order, *tiles)


@triton.jit
def _count_kernel(ids_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """counts [blocks, experts]: the pairs of each expert in each block."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EXPERTS_PADDED)
    ids = tl.load(ids_ptr + i, mask=i < pairs, other=-1).to(tl.int32)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * EXPERTS_PADDED + e, counts)


@triton.jit
def _layout_kernel(
    counts_ptr, tiles_ptr, blocks, most,
    TILE_PAIRS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Replaces the counts by where each block's pairs of an expert begin in the order, and lays out the tiles."""
    e = tl.arange(0, EXPERTS_PADDED)
    r = tl.arange(0, ROWS)
    totals = tl.zeros([EXPERTS_PADDED], tl.int32)
    for start in range(0, blocks, ROWS):
        at = counts_ptr + (start + r)[:, None] * EXPERTS_PADDED + e[None, :]
        totals += tl.sum(tl.load(at, mask=(start + r < blocks)[:, None], other=0), 0)
    ends = tl.cumsum(totals, 0)
    begin = ends - totals
    for start in range(0, blocks, ROWS):
        ok = (start + r < blocks)[:, None]
        at = counts_ptr + (start + r)[:, None] * EXPERTS_PADDED + e[None, :]
        counts = tl.load(at, mask=ok, other=0)
        tl.store(at, begin[None, :] + tl.cumsum(counts, 0) - counts, mask=ok)
        begin += tl.sum(counts, 0)
    begin = ends - totals
    tiles = (totals + TILE_PAIRS - 1) // TILE_PAIRS
    tile_ends = tl.cumsum(tiles, 0)
    tile_begin = tile_ends - tiles
    for start in range(0, most, TILES):
        t = start + tl.arange(0, TILES)
        mine = (t[:, None] >= tile_begin[None, :]) & (t[:, None] < tile_ends[None, :])  # at most one expert a tile
        expert = tl.sum(tl.where(mine, e[None, :] + 1, 0), 1) - 1
        first = tl.sum(tl.where(mine, begin[None, :] + (t[:, None] - tile_begin[None, :]) * TILE_PAIRS, 0), 1)
        end = tl.minimum(first + TILE_PAIRS, tl.sum(tl.where(mine, ends[None, :], 0), 1))
        tl.store(tiles_ptr + t, expert, mask=t < most)
        tl.store(tiles_ptr + most + t, first, mask=t < most)
        tl.store(tiles_ptr + 2 * most + t, end, mask=t < most)


@triton.jit
def _order_kernel(ids_ptr, begin_ptr, order_ptr, pairs, BLOCK: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """Puts the pairs of each block into their places, those of one expert in their own order."""
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EXPERTS_PADDED)
    ids = tl.load(ids_ptr + i, mask=i < pairs, other=-1).to(tl.int32)
    mine = ids[:, None] == e[None, :]
    begin = tl.load(begin_ptr + block * EXPERTS_PADDED + e)
    place = begin[None, :] + tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(order_ptr + tl.sum(tl.where(mine, place, 0), 1), i, mask=i < pairs)


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """GATED: silu(x @ gate.T) * (x @ up.T), read by token and written in sorted order. Else: read in sorted order,
    written by pair and multiplied by the pair's weight. Not SORTED: a tile is one pair, and `expert_ptr` its expert."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    if SORTED:
        i = tl.load(first_ptr + tile) + tl.arange(0, TILE_PAIRS)
        i_ok = i < tl.load(end_ptr + tile)
        pair = tl.load(order_ptr + i, mask=i_ok, other=0)
    else:
        i = tile + tl.arange(0, TILE_PAIRS)
        i_ok = i < tile + 1
        pair = tl.where(i_ok, i, 0)
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
    x_rows = x_ptr + source.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + weight_row[None, :] * SIZE_IN
    for start in tl.range(0, SIZE_IN, TILE_IN):
        j = start + k
        j_ok = j < SIZE_IN
        x = tl.load(x_rows + j[None, :], mask=i_ok[:, None] & j_ok[None, :], other=0.0)
        w = tl.load(weight_rows + j[:, None], mask=j_ok[:, None] & column_ok[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (TILE_PAIRS, 2, TILE_OUT)), (0, 2, 1)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        target = i
    else:
        acc = acc * tl.load(pair_weight_ptr + pair, mask=i_ok, other=0.0).to(tl.float32)[:, None]
        target = pair
    address = target.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=i_ok[:, None] & (o < SIZE_OUT)[None, :])


@triton.jit
def _combine_kernel(
    result_ptr, residual_ptr, out_ptr, K: tl.constexpr, HIDDEN: tl.constexpr, TILE: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The sum of each token's K weighted results, and of its residual."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = h < HIDDEN
    acc = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(K):
        acc += tl.load(result_ptr + (token * K + choice) * HIDDEN + h, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual_ptr + token * HIDDEN + h, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * HIDDEN + h, acc.to(out_ptr.dtype.element_ty), mask=ok)
