"""Decode attention over latents (MLA, absorbed; DeepSeek-AI, 2024) in the paged cache, in the Triton language.

All query heads share one latent per token, whose leading part is also the value: each is loaded to shared memory once
and used in two matmuls. A program has a block of rows, heads of one or more query tokens, and a share of the cache.

Persistent programs share the concatenated tiles of all sequences evenly, as Stream-K (Osama et al., 2023) does for
GEMMs: a program finishes one sequence's part, computes whole sequences and begins another's part. Each computes from
the lengths where its share begins, so that nothing is planned on the host and one captured graph serves every length. A
second kernel merges the sequences that several programs had parts of (flash decoding, Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.attention.calls import CachedLayer
from minisgl_backend.kernels.attention.scores import LOG2_E, for_cache
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.shared_memory import LARGEST
from minisgl_backend.kv.layout import FP8

MAX_WORKERS = 264  # per block of rows: two on each of 132 multiprocessors
# Of the merge (split-KV): (maximum query heads of the whole batch, partial results that a program reads at once).
MERGE_PARTS = ((64, 128), (128, 64), (256, 32))
SMALL_BATCH = 8  # sequences; up to this, one program of 16 rows runs on a multiprocessor, else two


@dataclass(frozen=True)
class LatentDecodeShape:
    """How a batch is split into programs."""

    rows: int  # of a program: query heads of consecutive tokens
    tile: int  # tokens per loop step
    num_warps: int
    num_stages: int
    workers: int  # programs of one block of rows


class LatentDecodeWorkspace:
    """Partial results: at most two sequences of a worker's share are shared with other workers."""

    def __init__(self, num_rows: int, rank: int, max_batch: int, device: torch.device) -> None:
        """num_rows: query heads of all query tokens of a sequence, at most."""
        self.partial = torch.empty(2 * MAX_WORKERS * num_rows * rank, dtype=torch.float32, device=device)
        self.lse = torch.empty(2 * MAX_WORKERS * num_rows, dtype=torch.float32, device=device)
        # For each sequence, the worker that has its first part, and the number of workers that have a part.
        self.parts = torch.empty(2 * max_batch, dtype=torch.int32, device=device)
        self.batch_padded = next_power_of_2(max_batch)


# Bytes of shared memory that the compiled kernels take with latents of 512 + 64 numbers of 16 bits.
_MANY_ROWS = ((64, 64, 8, 2, 221_184), (32, 64, 8, 2, 114_688), (32, 32, 4, 3, 75_780), (16, 32, 4, 3, 56_324))
_FEW_ROWS = ((16, 64, 4, 2, 94_208), (16, 32, 4, 3, 56_324))
_FLOAT32 = (16, 16, 4, 2)


def latent_decode_shape(
    batch: int, num_rows: int, num_sms: int = 132, shared: int = LARGEST, *, half_precision: bool = True
) -> LatentDecodeShape:
    """The shape that was measured best on an H100 (benchmarks/kernels); num_rows: query heads of all query tokens of a
    sequence, shared: bytes of a multiprocessor's shared memory.

    16 rows are memory-bound: two programs run at once on a multiprocessor, except in small batches, where more partial
    results take longer to merge. 64 rows are what one program's registers hold. Fewer rows give more programs, which
    the smallest batches need: 32 for one sequence, 16 for up to two of at most 32 heads.
    """
    if num_rows <= 16 or (num_rows <= 32 and batch <= 2):
        most = 16
    else:
        most = 32 if num_rows <= 32 or batch == 1 else 64
    cuts = _FEW_ROWS if most == 16 else [cut for cut in _MANY_ROWS if cut[0] <= most]
    rows, tile, num_warps, num_stages = next((cut[:4] for cut in cuts if cut[4] <= shared), cuts[-1][:4])
    if not half_precision:
        rows, tile, num_warps, num_stages = _FLOAT32
    at_once = 2 if rows == 16 and batch > SMALL_BATCH else 1  # programs per multiprocessor
    workers = min(MAX_WORKERS, max(1, at_once * num_sms // cdiv(num_rows, rows)))
    return LatentDecodeShape(rows, tile, num_warps, num_stages, workers)


def distinct_latent_batches(max_batch: int, num_rows: int) -> tuple[int, ...]:
    """Batch sizes up to max_batch, ascending: the smallest for each distinct compiled kernel."""
    firsts: dict[tuple[object, ...], int] = {}
    for batch in range(1, max_batch + 1):
        shape = latent_decode_shape(batch, num_rows)
        merge = _merge_shape(batch * num_rows, 1)
        firsts.setdefault((shape.rows, shape.tile, shape.num_warps, shape.num_stages, *merge), batch)
    return tuple(firsts.values())


class LatentDecodeBatch(NamedTuple):
    """A step's decode part, made once for all layers. Query tokens of a sequence are the last `num_queries` of its
    kv_lens tokens, causal. Captured graphs read the tensors."""

    rows: torch.Tensor  # int32 [batch]; of the page table
    kv_lens: torch.Tensor  # int32 [batch]
    page_table: torch.Tensor  # int32 [max_rows, max_pages]
    workspace: LatentDecodeWorkspace
    shape: LatentDecodeShape
    pdl: bool = False
    num_queries: int = 1


def latent_decode_attention(
    q: torch.Tensor, q_rope: torch.Tensor, layer: CachedLayer, batch: LatentDecodeBatch
) -> torch.Tensor:
    """Absorbed queries to attention output [batch * num_queries, num_q_heads, rank].

    q [batch * num_queries, num_q_heads, rank], contiguous; q_rope [batch * num_queries, num_q_heads, rope_dim], may be
    strided.
    """
    workspace, shape, table = batch.workspace, batch.shape, batch.page_table
    cache, kv_scale = layer.kv.k, layer.kv.scales.k  # [num_pages, 1, page_size, rank + rope_dim], contiguous
    (tokens, num_heads, rank), rope = q.shape, q_rope.shape[2]
    count, num_rows = tokens // batch.num_queries, batch.num_queries * num_heads
    out = torch.empty((tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    workers = min(shape.workers, MAX_WORKERS)
    rank_padded = max(16, next_power_of_2(rank))
    _latent_decode_kernel[(cdiv(num_rows, shape.rows), workers)](
        q, q_rope, cache, out, batch.rows, batch.kv_lens, table, workspace.partial, workspace.lse, workspace.parts,
        layer.scale * kv_scale * LOG2_E, kv_scale, q_rope.stride(0), q_rope.stride(1), table.stride(0), count,
        MAX_BATCH=workspace.batch_padded, TILE=shape.tile, PAGE_SIZE=cache.shape[2],
        ROWS=shape.rows, NUM_ROWS=num_rows, NUM_HEADS=num_heads, QUERIES=batch.num_queries, RANK=rank,
        RANK_PADDED=rank_padded, ROPE=rope, ROPE_PADDED=max(16, next_power_of_2(rope)),
        FP8=cache.dtype == FP8,
        num_warps=shape.num_warps, num_stages=shape.num_stages, **pdl_options(batch.pdl),
    )  # fmt: skip
    columns, parts = _merge_shape(count * num_rows, rank_padded)
    _merge_kernel[(num_rows, cdiv(rank, columns), count)](
        out, workspace.partial, workspace.lse, workspace.parts, NUM_ROWS=num_rows, RANK=rank, COLUMNS=columns,
        PARTS=parts, num_warps=4, **pdl_options(batch.pdl),
    )  # fmt: skip
    return out


def _merge_shape(num_rows: int, rank_padded: int) -> tuple[int, int]:
    """Of a program of the merge: numbers of the latent, and parts that it reads at once; num_rows: of the batch.

    The fewer sequences there are, the more parts each has, of which every further read takes about a microsecond."""
    for most, parts in MERGE_PARTS:
        if num_rows <= most:
            return min(64, rank_padded), parts
    return rank_padded, 4


@triton.jit(do_not_specialize=["batch"])
def _latent_decode_kernel(
    q_ptr, q_rope_ptr, kv_ptr, out_ptr, rows_ptr, kv_lens_ptr, table_ptr, partial_ptr, lse_ptr, parts_ptr, scale_log2,
    v_scale, q_stride_t, q_stride_h, table_stride, batch,
    MAX_BATCH: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    worker = tl.program_id(1)
    i = tl.arange(0, MAX_BATCH)
    lens = tl.load(kv_lens_ptr + i, mask=i < batch, other=0)
    ends = tl.cumsum(tl.cdiv(lens, TILE), 0)
    all_tiles = tl.max(ends, 0)
    share = tl.cdiv(all_tiles, tl.num_programs(1))
    tile = worker * share
    stop = tl.minimum(tile + share, all_tiles)
    b = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)  # tiles of the sequences before this one
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, RANK_PADDED)
    e = tl.arange(0, ROPE_PADDED)
    n = tl.arange(0, TILE)
    r_ok = r < NUM_ROWS
    latent_ok = r_ok[:, None] & (d < RANK)[None, :]
    while tile < stop:
        kv_len = tl.load(kv_lens_ptr + b)
        after = before + tl.cdiv(kv_len, TILE)
        part_stop = tl.minimum(stop, after)
        if (tile == before) & (tl.program_id(0) == 0):
            tl.store(parts_ptr + 2 * b, worker)
            tl.store(parts_ptr + 2 * b + 1, (after - 1) // share - worker + 1)
        table = table_ptr + tl.load(rows_ptr + b).to(tl.int64) * table_stride
        line = b.to(tl.int64) * NUM_ROWS + r
        q = tl.load(q_ptr + line[:, None] * RANK + d[None, :], mask=latent_ok, other=0.0)
        q_rope_row = q_rope_ptr + line // NUM_HEADS * q_stride_t + r % NUM_HEADS * q_stride_h
        q_rope = tl.load(q_rope_row[:, None] + e[None, :], mask=r_ok[:, None] & (e < ROPE)[None, :], other=0.0)
        q, q_rope = for_cache(q, FP8), for_cache(q_rope, FP8)
        last = kv_len - QUERIES + r // NUM_HEADS  # last token that the row's query sees
        m = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, RANK_PADDED], tl.float32)
        end = tl.minimum((part_stop - before) * TILE, kv_len)
        for start in tl.range((tile - before) * TILE, end, TILE):
            if PAGE_SIZE % TILE == 0:
                page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
                address = kv_ptr + (page * PAGE_SIZE + start % PAGE_SIZE) * (RANK + ROPE) + n[:, None] * (RANK + ROPE)
            else:
                position = tl.minimum(start + n, kv_len - 1)
                pages = tl.load(table + position // PAGE_SIZE).to(tl.int64)
                address = kv_ptr + (pages * PAGE_SIZE + position % PAGE_SIZE)[:, None] * (RANK + ROPE)
            n_ok = start + n < end
            latent = tl.load(address + d[None, :], mask=n_ok[:, None] & (d < RANK)[None, :], other=0.0)
            key = tl.load(address + RANK + e[None, :], mask=n_ok[:, None] & (e < ROPE)[None, :], other=0.0)
            if FP8:
                latent, key = latent.to(q.dtype), key.to(q.dtype)
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rope, tl.trans(key), scores, input_precision="ieee") * scale_log2
            if QUERIES == 1:
                seen = n_ok[None, :]
            else:
                seen = n_ok[None, :] & ((start + n)[None, :] <= last[:, None])
            scores = tl.where(seen, scores, -float("inf"))
            m_new = tl.maximum(tl.maximum(m, tl.max(scores, 1)), -1e30)
            p = tl.exp2(scores - m_new[:, None])
            correction = tl.exp2(m - m_new)
            total = total * correction + tl.sum(p, 1)
            acc = acc * correction[:, None]
            acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision="ieee")
            m = m_new
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        if FP8:
            result = result * v_scale
        if (tile == before) & (part_stop == after):
            tl.store(out_ptr + line[:, None] * RANK + d[None, :], result.to(out_ptr.dtype.element_ty), mask=latent_ok)
        else:
            # A worker's first part continues a sequence, its last part begins one.
            place = (2 * worker + (tile == before).to(tl.int32)).to(tl.int64) * NUM_ROWS + r
            tl.store(partial_ptr + place[:, None] * RANK + d[None, :], result, mask=latent_ok)
            tl.store(lse_ptr + place, tl.where(total > 0, m + tl.log2(total), -float("inf")), mask=r_ok)
        tile = part_stop
        before = after
        b += 1


@triton.jit
def _merge_kernel(
    out_ptr, partial_ptr, lse_ptr, parts_ptr,
    NUM_ROWS: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a sequence's parts, in part order, for one row and some of the latent's numbers."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    r = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.program_id(2).to(tl.int64)
    first = tl.load(parts_ptr + 2 * b)
    parts = tl.load(parts_ptr + 2 * b + 1)
    if parts <= 1:
        return
    j = tl.arange(0, PARTS)
    top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, parts, PARTS):
        part = start + j
        ok = part < parts
        place = (2 * (first + part) + (part == 0).to(tl.int32)).to(tl.int64) * NUM_ROWS + r
        lse = tl.load(lse_ptr + place, mask=ok, other=-float("inf"))
        values_ok = ok[:, None] & (d < RANK)[None, :]
        values = tl.load(partial_ptr + place[:, None] * RANK + d[None, :], mask=values_ok, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        correction = tl.exp2(top - new_top)
        total = total * correction + tl.sum(weight, 0)
        merged = merged * correction + tl.sum(weight[:, None] * values, 0)
        top = new_top
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (b * NUM_ROWS + r) * RANK + d, merged.to(out_ptr.dtype.element_ty), mask=d < RANK)
