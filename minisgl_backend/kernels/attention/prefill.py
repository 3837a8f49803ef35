"""Prefill attention over the paged KV cache, in the Triton language: ragged queries, cached prefixes, causal.

Online softmax over tiles of keys (FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.attention.calls import CachedLayer, PrefillBatch
from minisgl_backend.kernels.attention.scores import capped, capped_scale, for_cache, sink_logits
from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.shared_memory import shared_memory
from minisgl_backend.kv.layout import FP8


def prefill_attention(
    q: torch.Tensor, layer: CachedLayer, batch: PrefillBatch, out: torch.Tensor | None = None
) -> torch.Tensor:
    """q [num_tokens, num_q_heads, head_dim] -> attention output of the same shape, in `out` if given."""
    kv, table, max_q_len = layer.kv, batch.page_table, batch.max_q_len
    _, num_q_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = kv.k.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    half_precision = q.element_size() == 2
    long = half_precision and max_q_len > 64 and long_tiles_fit(head_dim, shared_memory(q.device))
    tile_q = 128 if long else 32
    scale_log2, cap_log2 = capped_scale(layer.scale * kv.scales.k, layer.soft_cap)
    tile_kv = 64 if half_precision else 32
    _prefill_kernel[(cdiv(max_q_len, tile_q), num_q_heads, batch.kv_lens.shape[0])](
        q, kv.k, kv.v, out, batch.cu_seqlens_q, batch.kv_lens, batch.rows, table, layer.sinks,
        scale_log2, kv.scales.v,
        q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), kv.k.stride(2), table.stride(0),
        GROUP=num_q_heads // num_kv_heads, NUM_Q_HEADS=num_q_heads, PAGE_SIZE=page_size,
        HEAD_DIM=head_dim, HEAD_PADDED=next_power_of_2(head_dim), TILE_Q=tile_q, TILE_KV=tile_kv,
        WINDOW=layer.window or layer.chunk or 0, CHUNKED=bool(layer.chunk), SOFT_CAP=cap_log2, FP8=kv.k.dtype == FP8,
        CAUSAL=batch.causal,
        num_warps=8 if tile_q == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def long_tiles_fit(head_dim: int, shared: int) -> bool:
    """Whether tiles of 128 queries and 64 keys and values, and their scores, in 16 bits, fit into `shared` bytes."""
    return 2 * ((128 + 2 * 64) * next_power_of_2(head_dim) + 128 * 64) <= shared


@triton.jit
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, cu_seqlens_ptr, kv_lens_ptr, rows_ptr, table_ptr, sinks_ptr,
    scale_log2, v_scale,
    q_stride_t, q_stride_h, kv_stride_page, kv_stride_head, kv_stride_token, table_stride,
    GROUP: tl.constexpr, NUM_Q_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr, FP8: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(2)
    head = tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + seq)
    q_len = tl.load(cu_seqlens_ptr + seq + 1) - first
    # Long tiles first: the last queries see the most keys.
    tile = tl.cdiv(q_len, TILE_Q) - 1 - tl.program_id(0)
    if tile < 0:
        return
    kv_len = tl.load(kv_lens_ptr + seq)
    table = table_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    i = tile * TILE_Q + tl.arange(0, TILE_Q)
    d = tl.arange(0, HEAD_PADDED)
    n = tl.arange(0, TILE_KV)
    d_ok = d < HEAD_DIM
    q_ok = (i < q_len)[:, None] & d_ok[None, :]
    q_row = (first + i).to(tl.int64)
    q = tl.load(q_ptr + q_row[:, None] * q_stride_t + head * q_stride_h + d[None, :], mask=q_ok, other=0.0)
    q = for_cache(q, FP8)
    position = kv_len - q_len + i
    kv_head_offset = (head // GROUP) * kv_stride_head

    m = tl.full([TILE_Q], -float("inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, HEAD_PADDED], tl.float32)
    end = kv_len
    if CAUSAL:
        end = tl.minimum(kv_len, kv_len - q_len + (tile + 1) * TILE_Q)
    begin = 0
    if CHUNKED:  # the tile in which the first query's chunk begins
        begin = (kv_len - q_len + tile * TILE_Q) // WINDOW * WINDOW // TILE_KV * TILE_KV
    elif WINDOW:  # the tile in which its window begins
        begin = tl.maximum(kv_len - q_len + tile * TILE_Q - WINDOW + 1, 0) // TILE_KV * TILE_KV
    for start in tl.range(begin, end, TILE_KV):
        token = start + n
        safe = tl.minimum(token, kv_len - 1)
        page = tl.load(table + safe // PAGE_SIZE).to(tl.int64)
        offset = page * kv_stride_page + kv_head_offset + (safe % PAGE_SIZE) * kv_stride_token
        address = offset[:, None] + d[None, :]
        ok = (token < end)[:, None] & d_ok[None, :]
        k = tl.load(k_ptr + address, mask=ok, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + address, mask=ok, other=0.0).to(q.dtype)
        scores = capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2, SOFT_CAP)
        seen = token[None, :] < kv_len
        if CAUSAL:
            seen = token[None, :] <= position[:, None]
        if CHUNKED:
            seen &= token[None, :] >= (position // WINDOW * WINDOW)[:, None]
        elif WINDOW:
            seen &= token[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(tl.maximum(m, tl.max(scores, 1)), -1e30)
        p = tl.exp2(scores - m_new[:, None])
        correction = tl.exp2(m - m_new)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    if sinks_ptr is not None:
        total += tl.exp2(sink_logits(sinks_ptr, head, head >= 0) - m)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    if FP8:
        out *= v_scale
    tl.store(
        out_ptr + (q_row[:, None] * NUM_Q_HEADS + head) * HEAD_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=q_ok,
    )
