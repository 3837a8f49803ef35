"""Pairs of (token, expert) sorted by expert and cut into tiles that belong to one expert each.

This is `moe_align_block_size` of vLLM and SGLang. The host does not wait for the device: only the device knows the
number of tiles, so their list has room for the largest number possible.

The numbers of pairs, blocks and tiles differ in almost every step with a prompt part, so kernels are not specialized on
their values or divisibility: a compilation would stall running streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options

ALIGN_BLOCK = 128  # pairs that one program counts and sorts
SCAN_EXPERTS = 8  # experts whose counts one program adds up
FEW_BLOCKS = 32  # blocks whose counts are added up at once; with more blocks, those of 512
LAID_TILES = 32  # tiles that one program lays out at once


@dataclass(frozen=True)
class Tiles:
    """Which pairs each tile holds, on the device; int32."""

    order: torch.Tensor  # [num_pairs]  pairs sorted by expert, those of one expert by number
    place: torch.Tensor  # [num_pairs]  index of each pair in `order`
    expert: torch.Tensor  # [max_tiles]  of each tile; -1: unused
    first: torch.Tensor  # [max_tiles]  index into `order`
    end: torch.Tensor  # [max_tiles]
    used: torch.Tensor  # [1]  the number of tiles that hold pairs; they come first
    totals: torch.Tensor  # [at least num_experts]  pairs of each expert


def align(expert_ids: torch.Tensor, num_experts: int, tile_pairs: int, pdl: bool = False) -> Tiles:
    """Sorts pairs by expert in three launches: counts by block, their prefix sums, then positions and tiles.

    expert_ids int64 [num_tokens, k], contiguous. pdl: programmatic dependent launch, see plain/small_rows.py.
    """
    pairs, device = expert_ids.numel(), expert_ids.device
    blocks = cdiv(pairs, ALIGN_BLOCK)
    most = -(-min(pairs, pairs // tile_pairs + num_experts) // 4) * 4  # addresses stay aligned to 16 bytes
    padded = max(SCAN_EXPERTS, next_power_of_2(num_experts))
    counts = torch.empty((blocks, padded), dtype=torch.int32, device=device)
    totals = torch.empty(padded, dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    place = torch.empty_like(order)
    tiles = torch.empty((3, most), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](
        expert_ids, counts, pairs, BLOCK=ALIGN_BLOCK, EXPERTS_PADDED=padded, num_warps=4, **pdl_options(pdl)
    )
    _scan_kernel[(padded // SCAN_EXPERTS,)](
        counts, totals, blocks, EXPERTS_PADDED=padded, EXPERTS=SCAN_EXPERTS,
        ROWS=FEW_BLOCKS if blocks <= FEW_BLOCKS else 512, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    _place_kernel[(blocks,)](
        expert_ids, counts, totals, order, place, tiles, used, pairs, most, BLOCK=ALIGN_BLOCK, EXPERTS_PADDED=padded,
        TILE_PAIRS=tile_pairs, TILES=LAID_TILES, num_warps=2 if blocks > FEW_BLOCKS else 8, **pdl_options(pdl),
    )  # fmt: skip
    return Tiles(order, place, tiles[0], tiles[1], tiles[2], used, totals)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids_ptr, counts_ptr, pairs, BLOCK: tl.constexpr, EXPERTS_PADDED: tl.constexpr, PDL: tl.constexpr):
    """counts [blocks, experts]: the pairs of each expert in each block."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EXPERTS_PADDED)
    ids = tl.load(ids_ptr + i, mask=i < pairs, other=-1).to(tl.int32)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * EXPERTS_PADDED + e, counts)


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    counts_ptr, totals_ptr, blocks, EXPERTS_PADDED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Replaces the counts of a few experts by their prefix sums over blocks; totals [experts]: over all blocks."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    r = tl.arange(0, ROWS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, blocks, ROWS):
        ok = (start + r < blocks)[:, None]
        at = counts_ptr + (start + r)[:, None] * EXPERTS_PADDED + e[None, :]
        counts = tl.load(at, mask=ok, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=ok)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + e, total)


@triton.jit(do_not_specialize=["pairs", "most"])
def _place_kernel(
    ids_ptr, before_ptr, totals_ptr, order_ptr, place_ptr, tiles_ptr, used_ptr, pairs, most,
    BLOCK: tl.constexpr, EXPERTS_PADDED: tl.constexpr, TILE_PAIRS: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Writes the sorted position of each pair of a block (pairs of one expert stay in order), and lays out tiles."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    block = tl.program_id(0)
    e = tl.arange(0, EXPERTS_PADDED)
    totals = tl.load(totals_ptr + e)
    ends = tl.cumsum(totals, 0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + i, mask=i < pairs, other=-1).to(tl.int32)
    earlier = (ids[None, :] == ids[:, None]) & (i[None, :] < i[:, None])
    smaller = tl.where(e[None, :] < ids[:, None], totals[None, :], 0)  # pairs of the experts before
    place = tl.sum(smaller, 1) + tl.sum(earlier.to(tl.int32), 1)
    place += tl.load(before_ptr + block * EXPERTS_PADDED + ids, mask=i < pairs, other=0)
    tl.store(order_ptr + place, i, mask=i < pairs)
    tl.store(place_ptr + i, place, mask=i < pairs)

    tiles = (totals + TILE_PAIRS - 1) // TILE_PAIRS
    tile_ends = tl.cumsum(tiles, 0)
    tile_begin = tile_ends - tiles
    if block == 0:
        tl.store(used_ptr, tl.sum(tiles, 0))
    for start in tl.range(block * TILES, most, tl.num_programs(0) * TILES):
        t = start + tl.arange(0, TILES)
        mine = (t[:, None] >= tile_begin[None, :]) & (t[:, None] < tile_ends[None, :])  # at most one expert per tile
        expert = tl.sum(tl.where(mine, e[None, :] + 1, 0), 1) - 1
        begin = (ends - totals)[None, :] + (t[:, None] - tile_begin[None, :]) * TILE_PAIRS
        first = tl.sum(tl.where(mine, begin, 0), 1)
        end = tl.minimum(first + TILE_PAIRS, tl.sum(tl.where(mine, ends[None, :], 0), 1))
        tl.store(tiles_ptr + t, expert, mask=t < most)
        tl.store(tiles_ptr + most + t, first, mask=t < most)
        tl.store(tiles_ptr + 2 * most + t, end, mask=t < most)
