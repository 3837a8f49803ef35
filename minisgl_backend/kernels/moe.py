"""Mixture of experts, in the Triton language: which experts a token takes, and their MLPs as two grouped products.

Nothing waits for the device. Pairs of (token, expert) are sorted by expert and cut into
tiles that belong to one expert each. How many tiles there are is known on the device only, so the grid has room for
the most there can be and the rest return at once; hence it runs under CUDA graphs, in decode and in prefill. Few
pairs are not sorted: most have an expert of their own, and sorting takes more launches than all products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

UNSORTED_PAIRS = 64  # at most; with 128 experts and uniform routing they name 50 different ones


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
class _Tiles:
    """Which pairs each tile holds, on the device."""

    order: torch.Tensor  # int32 [num_pairs]  pairs sorted by expert
    expert: torch.Tensor  # int32 [max_tiles]  of each tile; -1: not used
    first: torch.Tensor  # int32 [max_tiles]  index into `order`
    end: torch.Tensor  # int32 [max_tiles]
    size: int  # pairs a tile


def moe(
    x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts; the contract is `Ops.moe`'s.

    x [num_tokens, hidden], expert_ids int [num_tokens, k], expert_weights [num_tokens, k],
    gate_up [num_experts, 2 * size, hidden], down [num_experts, hidden, size] -> [num_tokens, hidden].
    """
    num_tokens, hidden = x.shape
    num_experts, _, size = down.shape
    k = expert_ids.shape[1]
    tiles = _cut(expert_ids, num_experts)
    pairs = num_tokens * k
    activated = torch.empty((pairs, size), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    few = tiles.size == 16
    shape = {"TILE_IN": 128 if few else 64, "num_warps": 4 if few else 8, "num_stages": 4 if few else 3}
    tile_out = 64 if few else 128
    arguments = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    count = tiles.expert.shape[0]
    _grouped_kernel[(count, triton.cdiv(size, tile_out // 2 if few else 64))](
        x, gate_up, activated, *arguments, x.stride(0), K=k, SIZE_OUT=size, SIZE_IN=hidden, TILE_PAIRS=tiles.size,
        TILE_OUT=tile_out // 2 if few else 64, GATED=True, **shape,
    )  # fmt: skip
    _grouped_kernel[(count, triton.cdiv(hidden, tile_out))](
        activated, down, result, *arguments, activated.stride(0), K=k, SIZE_OUT=hidden, SIZE_IN=size,
        TILE_PAIRS=tiles.size, TILE_OUT=tile_out, GATED=False, **shape,
    )  # fmt: skip
    return result.view(num_tokens, k, hidden).sum(1, dtype=torch.float32).to(x.dtype)


def _cut(expert_ids: torch.Tensor, num_experts: int) -> _Tiles:
    flat = expert_ids.flatten()
    pairs = flat.numel()
    if pairs <= UNSORTED_PAIRS:
        order = torch.arange(pairs, dtype=torch.int32, device=flat.device)
        return _Tiles(order=order, expert=flat.to(torch.int32), first=order, end=order + 1, size=16)
    # A tile of 16 wastes little when each expert has few pairs; 64 uses the tensor cores when there are many.
    size = 16 if pairs <= 16 * num_experts else 64
    most = min(pairs, pairs // size + num_experts)
    order = flat.argsort(stable=True).to(torch.int32)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    tiles_of = (counts + size - 1) // size
    tile_ends = tiles_of.cumsum(0, dtype=torch.int32)
    tile = torch.arange(most, dtype=torch.int32, device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True, out_int32=True)
    used = expert < num_experts
    known = expert.clamp_max(num_experts - 1)
    first = ends[known] - counts[known] + (tile - (tile_ends[known] - tiles_of[known])) * size
    return _Tiles(
        order=order,
        expert=torch.where(used, expert, -1).to(torch.int32),
        first=first.to(torch.int32),
        end=torch.minimum(first + size, ends[known]).to(torch.int32),
        size=size,
    )


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, out_ptr, order_ptr, expert_ptr, first_ptr, end_ptr, pair_weight_ptr, x_stride,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    TILE_PAIRS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """GATED: silu(x @ gate.T) * (x @ up.T), read by token and written in sorted order. Else: read in sorted order,
    written by pair and multiplied by the pair's weight."""
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile)
    if expert < 0:
        return
    i = tl.load(first_ptr + tile) + tl.arange(0, TILE_PAIRS)
    i_ok = i < tl.load(end_ptr + tile)
    pair = tl.load(order_ptr + i, mask=i_ok, other=0)
    source = pair // K if GATED else i
    o = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    rows_of_expert = 2 * SIZE_OUT if GATED else SIZE_OUT
    weight_rows = weight_ptr + (expert.to(tl.int64) * rows_of_expert + o)[None, :] * SIZE_IN
    x_rows = x_ptr + source.to(tl.int64)[:, None] * x_stride
    k = tl.arange(0, TILE_IN)
    acc = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    acc_up = tl.zeros([TILE_PAIRS, TILE_OUT], tl.float32)
    for start in tl.range(0, SIZE_IN, TILE_IN):
        j = start + k
        j_ok = j < SIZE_IN
        x = tl.load(x_rows + j[None, :], mask=i_ok[:, None] & j_ok[None, :], other=0.0)
        w_ok = j_ok[:, None] & o_ok[None, :]
        w = tl.load(weight_rows + j[:, None], mask=w_ok, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            w_up = tl.load(weight_rows + SIZE_OUT * SIZE_IN + j[:, None], mask=w_ok, other=0.0)
            acc_up = tl.dot(x, w_up, acc_up, input_precision="ieee")
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        target = i
    else:
        acc = acc * tl.load(pair_weight_ptr + pair, mask=i_ok, other=0.0).to(tl.float32)[:, None]
        target = pair
    address = target.to(tl.int64)[:, None] * SIZE_OUT + o[None, :]
    tl.store(out_ptr + address, acc.to(out_ptr.dtype.element_ty), mask=i_ok[:, None] & o_ok[None, :])
