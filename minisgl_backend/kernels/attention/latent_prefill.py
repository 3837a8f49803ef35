"""Prefill attention to keys and values expanded from latents (MLA; DeepSeek-AI, 2024), in the Triton language.

A head's key is in two parts: its own, and the rotated one that all heads share. Online softmax over tiles of keys
(FlashAttention-2, Dao 2023), which continues from the result over earlier pieces of a sequence's keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.attention.calls import Expanded
from minisgl_backend.kernels.attention.scores import LOG2_E
from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.shared_memory import shared_memory

SHORT = 64  # queries of a segment up to which tiles are smaller


def latent_prefill_attention(expanded: Expanded, segments: torch.Tensor, max_q_len: int, scale: float) -> None:
    """Adds attention to some keys to `expanded.out`.

    segments int32 [num_segments, 6]: see `attention.latent.base.Piece`; max_q_len: the longest segment's queries, a
    host integer.
    """
    q, keys_values, keys, out, lse = expanded
    num_heads, v_dim = out.shape[1:]
    nope, rope = keys_values.shape[2] - v_dim, keys.shape[1]
    padded = [max(16, next_power_of_2(size)) for size in (nope, rope, v_dim)]
    tile_q, tile_kv = prefill_tiles(padded, q.element_size(), max_q_len, shared_memory(q.device))
    _latent_prefill_kernel[(cdiv(max_q_len, tile_q), num_heads, len(segments))](
        q, keys_values, keys, out, lse, segments, scale * LOG2_E,
        q.stride(0), q.stride(1),
        NUM_HEADS=num_heads, NOPE=nope, NOPE_PADDED=padded[0], ROPE=rope, ROPE_PADDED=padded[1], V=v_dim,
        V_PADDED=padded[2], TILE_Q=tile_q, TILE_KV=tile_kv, num_warps=8 if tile_q == 128 else 4, num_stages=2,
    )  # fmt: skip


def prefill_tiles(sizes: Sequence[int], item_bytes: int, max_q_len: int, shared: int) -> tuple[int, int]:
    """(Queries, keys) of a program's tiles, which fit into `shared` bytes. sizes: padded nope, rope and value sizes."""
    nope, rope, value = sizes
    tiles = ((128, 64), (64, 64), (64, 32), (32, 64), (32, 32), (16, 16))
    for tile_q, tile_kv in tiles if item_bytes == 2 else tiles[-1:]:
        fits = item_bytes * (tile_q * (nope + rope) + 2 * tile_kv * (nope + rope + value)) <= shared
        if fits and (tile_q <= 32 or max_q_len > SHORT) and not (tile_q == 128 and value > 128):
            return tile_q, tile_kv
    return tiles[-1]


@triton.jit
def _latent_prefill_kernel(
    q_ptr, kv_ptr, key_ptr, out_ptr, lse_ptr, segments_ptr, scale_log2,
    q_stride_t, q_stride_h,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PADDED: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr, V: tl.constexpr, V_PADDED: tl.constexpr, TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    segment = segments_ptr + tl.program_id(2) * 6
    q_begin = tl.load(segment)
    q_len = tl.load(segment + 1) - q_begin
    # Long tiles first: the last queries see the most keys.
    tile = tl.cdiv(q_len, TILE_Q) - 1 - tl.program_id(0)
    if tile < 0:
        return
    kv_begin = tl.load(segment + 2)
    kv_len = tl.load(segment + 3) - kv_begin
    offset = tl.load(segment + 4)
    continues = tl.load(segment + 5)
    end = tl.minimum(kv_len, offset + (tile + 1) * TILE_Q)
    if (end <= 0) & (continues != 0):
        return
    i = tile * TILE_Q + tl.arange(0, TILE_Q)
    d = tl.arange(0, NOPE_PADDED)
    e = tl.arange(0, ROPE_PADDED)
    c = tl.arange(0, V_PADDED)
    n = tl.arange(0, TILE_KV)
    i_ok = i < q_len
    q_row = (q_begin + i).to(tl.int64)
    q_head = q_ptr + q_row[:, None] * q_stride_t + head * q_stride_h
    q = tl.load(q_head + d[None, :], mask=i_ok[:, None] & (d < NOPE)[None, :], other=0.0)
    q_rope = tl.load(q_head + NOPE + e[None, :], mask=i_ok[:, None] & (e < ROPE)[None, :], other=0.0)
    out_address = out_ptr + (q_row * NUM_HEADS + head)[:, None] * V + c[None, :]
    out_ok = i_ok[:, None] & (c < V)[None, :]

    m = tl.full([TILE_Q], -float("inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    acc = tl.zeros([TILE_Q, V_PADDED], tl.float32)
    if continues != 0:
        m = tl.load(lse_ptr + q_row * NUM_HEADS + head, mask=i_ok, other=-float("inf"))
        total = tl.where(m > -1e30, 1.0, 0.0)
        acc = tl.load(out_address, mask=out_ok, other=0.0).to(tl.float32)
    for start in tl.range(0, end, TILE_KV):
        n_ok = start + n < kv_len
        row = (kv_begin + start + n).to(tl.int64)
        kv = kv_ptr + (row * NUM_HEADS + head)[:, None] * (NOPE + V)
        k = tl.load(kv + d[None, :], mask=n_ok[:, None] & (d < NOPE)[None, :], other=0.0)
        v = tl.load(kv + NOPE + c[None, :], mask=n_ok[:, None] & (c < V)[None, :], other=0.0)
        key_ok = n_ok[:, None] & (e < ROPE)[None, :]
        key = tl.load(key_ptr + row[:, None] * ROPE + e[None, :], mask=key_ok, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(key), scores, input_precision="ieee") * scale_log2
        seen = n_ok[None, :] & ((start + n)[None, :] <= (offset + i)[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        m_new = tl.maximum(tl.maximum(m, tl.max(scores, 1)), -1e30)
        p = tl.exp2(scores - m_new[:, None])
        correction = tl.exp2(m - m_new)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m = m_new
    tl.store(out_address, (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty), mask=out_ok)
    lse = tl.where(total > 0, m + tl.log2(total), -float("inf"))
    tl.store(lse_ptr + q_row * NUM_HEADS + head, lse, mask=i_ok)
