"""Decode attention over the paged KV cache, in the Triton language: one query token a sequence.

Knows nothing of layers, graphs or scheduling.

Flash decoding (Dao et al., 2023): a sequence's cache is cut into at most `num_splits` parts, each computed by its
own program for all query heads of one KV head; the program that finishes a sequence last merges the partial
results, so that no second kernel is needed. The parts adapt to each sequence's length, hence one captured graph
serves every length and long sequences do not keep one multiprocessor busy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@dataclass(frozen=True)
class DecodeShape:
    """How one batch size is cut into programs."""

    num_splits: int  # most parts of a sequence
    min_part: int  # tokens; shorter sequences are not cut
    tile: int  # tokens a loop step
    num_warps: int
    num_stages: int


class DecodeWorkspace:
    """Partial results and arrival counters for one backend; the counters return to zero after every launch."""

    def __init__(
        self, max_batch: int, num_q_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        parts = max_batch * MAX_PROGRAMS_FACTOR
        parts = max(parts, 64)
        self.partial = torch.empty(parts * num_q_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(parts * num_q_heads, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)
        self.parts = parts


MAX_PROGRAMS_FACTOR = 8  # parts a sequence for which there is room at the largest batch


def decode_shape(batch: int, num_kv_heads: int, num_sms: int = 132) -> DecodeShape:
    """The cut that was measured best on an H200 (benchmarks/kernels.py).

    Few sequences are cut finely, to use every multiprocessor; many are cut only where one is much longer than the
    rest, since each part costs a partial result.
    """
    programs = batch * num_kv_heads
    if programs >= 8 * num_sms:
        return DecodeShape(num_splits=4, min_part=1024, tile=64, num_warps=4, num_stages=3)
    if programs >= 3 * num_sms:
        return DecodeShape(num_splits=4, min_part=512, tile=64, num_warps=4, num_stages=3)
    if programs >= 2 * num_sms - num_sms // 8:
        return DecodeShape(num_splits=4, min_part=1024, tile=64, num_warps=4, num_stages=3)
    # Two programs fit a multiprocessor: no more of them than run at once.
    splits = 4
    while splits < 32 and programs * splits * 2 <= 2 * num_sms:
        splits *= 2
    return DecodeShape(num_splits=splits, min_part=64, tile=64, num_warps=4, num_stages=3)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: DecodeWorkspace,
    shape: DecodeShape,
    scale: float,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of one query token a sequence over its kv_lens cached tokens.

    q [batch, num_q_heads, head_dim] (rows may be strided), caches [num_pages, num_kv_heads, page_size, head_dim],
    rows and kv_lens int32 [batch], page_table int32 [max_rows, max_pages]. Returns [batch, num_q_heads, head_dim].
    pdl: start while the kernel before this one drains (programmatic dependent launch, Hopper and later).
    """
    batch, num_q_heads, head_dim = q.shape
    _, num_kv_heads, page_size, _ = k_cache.shape
    group = num_q_heads // num_kv_heads
    out = torch.empty((batch, num_q_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    splits = max(1, min(shape.num_splits, workspace.parts // batch))
    extra = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(num_kv_heads, batch, splits)](
        q, k_cache, v_cache, out, rows, kv_lens, page_table,
        workspace.partial, workspace.lse, workspace.counters,
        scale * 1.4426950408889634,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), page_table.stride(0),
        NUM_SPLITS=splits, MIN_PART=shape.min_part, TILE=shape.tile, PAGE_SIZE=page_size,
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HEAD_PADDED=triton.next_power_of_2(head_dim),
        SPLITS_PADDED=triton.next_power_of_2(splits),
        PDL=pdl, num_warps=shape.num_warps, num_stages=shape.num_stages, **extra,
    )  # fmt: skip
    return out


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, kv_lens_ptr, table_ptr,
    partial_ptr, lse_ptr, counters_ptr,
    scale_log2,
    q_stride_b, q_stride_h, kv_stride_page, kv_stride_head, kv_stride_token, table_stride,
    NUM_SPLITS: tl.constexpr, MIN_PART: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr + b)
    part = tl.maximum(tl.cdiv(kv_len, NUM_SPLITS), MIN_PART)
    part = tl.cdiv(part, TILE) * TILE
    active = tl.cdiv(kv_len, part)
    if split >= active:
        return
    begin = split * part
    end = tl.minimum(begin + part, kv_len)

    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, HEAD_PADDED)
    n = tl.arange(0, TILE)
    d_ok = d < HEAD_DIM
    q_ok = (g[:, None] < GROUP) & d_ok[None, :]
    q_head = kv_head * GROUP + g
    q = tl.load(q_ptr + b * q_stride_b + q_head[:, None] * q_stride_h + d[None, :], mask=q_ok, other=0.0)
    row = tl.load(rows_ptr + b).to(tl.int64)
    table = table_ptr + row * table_stride
    head_offset = kv_head * kv_stride_head

    m = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    for start in tl.range(begin, end, TILE):
        if PAGE_SIZE % TILE == 0:
            page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
            token_offset = page * kv_stride_page + (start % PAGE_SIZE + n) * kv_stride_token
        else:
            position = tl.minimum(start + n, kv_len - 1)
            page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
            token_offset = page * kv_stride_page + (position % PAGE_SIZE) * kv_stride_token
        n_ok = start + n < end
        address = head_offset + token_offset[:, None] + d[None, :]
        k = tl.load(k_ptr + address, mask=n_ok[:, None] & d_ok[None, :], other=0.0)
        v = tl.load(v_ptr + address, mask=n_ok[:, None] & d_ok[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(n_ok[None, :], scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        correction = tl.exp2(m - m_new)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new

    out_address = (b * NUM_Q_HEADS + q_head[:, None]) * HEAD_DIM + d[None, :]
    if active == 1:
        tl.store(out_ptr + out_address, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=q_ok)
        return

    # This part's result, then the arrival: whoever arrives last merges all parts in part order.
    index = (b * NUM_SPLITS + split) * NUM_Q_HEADS + q_head
    tl.store(partial_ptr + index[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=q_ok)
    tl.store(lse_ptr + index, m + tl.log2(total), mask=g < GROUP)
    tl.debug_barrier()
    counter = counters_ptr + b * NUM_KV_HEADS + kv_head
    arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    if arrived == active - 1:
        tl.store(counter, 0)
        s = tl.arange(0, SPLITS_PADDED)
        merged = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
        lse_index = (b * NUM_SPLITS + s[None, :]) * NUM_Q_HEADS + q_head[:, None]
        lse_ok = (s[None, :] < active) & (g[:, None] < GROUP)
        lse = tl.load(lse_ptr + lse_index, mask=lse_ok, other=-float("inf"), cache_modifier=".cg")
        top = tl.maximum(tl.max(lse, 1), -1e30)
        weight_sum = tl.sum(tl.exp2(lse - top[:, None]), 1)
        for i in tl.range(0, active):
            part_index = (b * NUM_SPLITS + i) * NUM_Q_HEADS + q_head
            part_lse = tl.load(lse_ptr + part_index, mask=g < GROUP, other=-float("inf"), cache_modifier=".cg")
            part_out = tl.load(
                partial_ptr + part_index[:, None] * HEAD_DIM + d[None, :], mask=q_ok, other=0.0, cache_modifier=".cg"
            )
            merged += tl.exp2(part_lse - top)[:, None] * part_out
        weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
        tl.store(out_ptr + out_address, (merged / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=q_ok)
