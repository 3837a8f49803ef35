"""Attention within segments, in the Triton language: every token sees all tokens of its segment, as patches of an
image or of a window do.

Queries, keys and values are read where the projection has left them. Encoders have heads of 72 or 80 numbers, which
tensor cores would pad to 128: a head is computed as two parts, the largest power of two in it and the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2

_LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """Queries, in groups of which a program takes one each."""

    bounds: torch.Tensor  # int32 [num_segments + 1], where segments begin
    places: torch.Tensor  # int32 [num_tiles, 3]: of each its segment, its first token, and the one behind it
    size: int  # tokens, at most


def halves_pay(num_tiles: int, num_heads: int, multiprocessors: int) -> bool:
    """Whether programs for half of the keys each leave fewer multiprocessors idle at the end: two programs with heads
    of 80 numbers at most run on one of Hopper."""
    programs, at_once = num_tiles * num_heads, 2 * multiprocessors
    return 2 * cdiv(programs, at_once) > 1.05 * cdiv(2 * programs, at_once)


def segment_attention(
    qkv: torch.Tensor, tiles: Tiles, first: int, last: int, *, in_halves: bool = False
) -> torch.Tensor:
    """qkv [num_tokens, 3, num_heads, head_dim], 16-bit floats; tiles: of the queries `first` to `last` - 1; in_halves:
    a program has half of a segment's keys, of which each has more than a tile. Returns [last - first, num_heads *
    head_dim]."""
    _, _, num_heads, head_dim = qkv.shape
    tile, parts = tiles.size, 1 + in_halves
    out = torch.empty((last - first, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    partial, lse = out, out  # not written
    if in_halves:
        shape = parts, last - first, num_heads
        partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=qkv.device)
        lse = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    most = next_power_of_2(head_dim + 1) // 2
    rest = 0 if most == head_dim else max(16, next_power_of_2(head_dim - most))
    _kernel[(len(tiles.places), num_heads, parts)](
        qkv, partial, lse, tiles.bounds, tiles.places, first, last - first, qkv.stride(0), head_dim**-0.5 * _LOG2_E,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, FIRST=most, REST=rest, QUERIES=tile, KEYS=64, PARTS=parts,
        num_warps=4 if tile <= 64 else 8, num_stages=3,
    )  # fmt: skip
    if in_halves:
        _merge_kernel[(last - first,)](
            partial, lse, out, last - first, NUM_HEADS=num_heads, HEADS_PADDED=next_power_of_2(num_heads),
            HEAD_DIM=head_dim, HEAD_PADDED=next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _kernel(
    qkv_ptr, out_ptr, lse_ptr, bounds_ptr, tiles_ptr, first_row, num_rows, stride, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)  # tiles of one head follow each other: its keys and values stay in the L2 cache
    head = tl.program_id(1)
    segment = tl.load(tiles_ptr + 3 * at)
    start = tl.load(tiles_ptr + 3 * at + 1)
    stop = tl.load(tiles_ptr + 3 * at + 2)
    begin = tl.load(bounds_ptr + segment)
    end = tl.load(bounds_ptr + segment + 1)
    if PARTS > 1:
        keys = tl.cdiv(tl.cdiv(end - begin, KEYS), PARTS) * KEYS
        begin += tl.program_id(2) * keys
        end = tl.minimum(end, begin + keys)
    m = start + tl.arange(0, QUERIES)
    n = tl.arange(0, KEYS)
    d = tl.arange(0, FIRST)
    m_ok = m[:, None] < stop
    q_row = qkv_ptr + m.to(tl.int64)[:, None] * stride + head * HEAD_DIM
    q = tl.load(q_row + d[None, :], mask=m_ok, other=0.0)
    k_head = qkv_ptr + (NUM_HEADS + head) * HEAD_DIM
    v_head = k_head + NUM_HEADS * HEAD_DIM
    acc = tl.zeros([QUERIES, FIRST], tl.float32)
    if REST:
        e = FIRST + tl.arange(0, REST)
        e_ok = e[None, :] < HEAD_DIM
        q_rest = tl.load(q_row + e[None, :], mask=m_ok & e_ok, other=0.0)
        acc_rest = tl.zeros([QUERIES, REST], tl.float32)
    else:
        e, e_ok, q_rest, acc_rest = d, m_ok, q, acc  # not read
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    whole = begin + (end - begin) // KEYS * KEYS
    for key in tl.range(begin, whole, KEYS):
        acc, acc_rest, top, total = _attend_tile(
            q, q_rest, k_head, v_head, key, end, stride, acc, acc_rest, top, total, scale_log2, d, e, e_ok, n, REST,
            False,
        )  # fmt: skip
    if whole < end:
        acc, acc_rest, top, total = _attend_tile(
            q, q_rest, k_head, v_head, whole, end, stride, acc, acc_rest, top, total, scale_log2, d, e, e_ok, n, REST,
            True,
        )  # fmt: skip
    row = (tl.program_id(2) * num_rows + m - first_row).to(tl.int64) * NUM_HEADS + head
    out_row = out_ptr + row[:, None] * HEAD_DIM
    if PARTS > 1:
        tl.store(lse_ptr + row, top + tl.log2(total), mask=m < stop)
    tl.store(out_row + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=m_ok)
    if REST:
        tl.store(out_row + e[None, :], (acc_rest / total[:, None]).to(out_ptr.dtype.element_ty), mask=m_ok & e_ok)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, num_rows,
    NUM_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """Of one query: both halves, weighted by what their scores sum up to."""
    h = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, HEAD_PADDED)[None, :]
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + h
    other = row + num_rows.to(tl.int64) * NUM_HEADS
    ok = (h < NUM_HEADS)[:, None] & (d < HEAD_DIM)
    first = tl.load(lse_ptr + row, mask=h < NUM_HEADS, other=0.0)
    second = tl.load(lse_ptr + other, mask=h < NUM_HEADS, other=0.0)
    share = (1.0 / (1.0 + tl.exp2(second - first)))[:, None]  # of the first half
    a = tl.load(partial_ptr + row[:, None] * HEAD_DIM + d, mask=ok, other=0.0)
    b = tl.load(partial_ptr + other[:, None] * HEAD_DIM + d, mask=ok, other=0.0)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + d, (b + (a - b) * share).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _attend_tile(
    q, q_rest, k_head, v_head, key, end, stride, acc, acc_rest, top, total, scale_log2, d, e, e_ok, n,
    REST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax; MASKED: some of the tile's keys are behind `end`."""
    rows = (key + n).to(tl.int64)[:, None] * stride
    n_ok = (key + n < end)[:, None]
    if MASKED:
        k = tl.load(k_head + rows + d[None, :], mask=n_ok, other=0.0)
        v = tl.load(v_head + rows + d[None, :], mask=n_ok, other=0.0)
    else:
        k = tl.load(k_head + rows + d[None, :])
        v = tl.load(v_head + rows + d[None, :])
    scores = tl.dot(q, tl.trans(k))
    if REST:
        rest_ok = (n_ok & e_ok) if MASKED else e_ok
        k_rest = tl.load(k_head + rows + e[None, :], mask=rest_ok, other=0.0)
        v_rest = tl.load(v_head + rows + e[None, :], mask=rest_ok, other=0.0)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores)
    if MASKED:
        scores = tl.where((key + n < end)[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_top[:, None])
    correction = tl.exp2(top - new_top)
    total = total * correction + tl.sum(p, 1)
    p = p.to(q.dtype)
    acc = tl.dot(p, v, acc * correction[:, None])
    if REST:
        acc_rest = tl.dot(p, v_rest, acc_rest * correction[:, None])
    return acc, acc_rest, new_top, total


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates queries and keys in place: qkv [num_tokens, 3, num_heads, head_dim], float32 cos and sin [num_tokens,
    head_dim / 2]. Dimension i turns with i + head_dim / 2."""
    num_tokens, _, num_heads, head_dim = qkv.shape
    half, heads = head_dim // 2, 2 * num_heads
    _rotate_kernel[(num_tokens,)](
        qkv, cos, sin, qkv.stride(0), HEADS=heads, HEADS_PADDED=next_power_of_2(heads), HALF=half,
        HALF_PADDED=next_power_of_2(half), num_warps=4,
    )  # fmt: skip


@triton.jit
def _rotate_kernel(
    qkv_ptr, cos_ptr, sin_ptr, stride,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PADDED)[:, None]
    i = tl.arange(0, HALF_PADDED)[None, :]
    ok = (head < HEADS) & (i < HALF)
    cos = tl.load(cos_ptr + token * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + i, mask=i < HALF, other=0.0)
    row = qkv_ptr + token * stride + head * (2 * HALF) + i
    first = tl.load(row, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(row + HALF, mask=ok, other=0.0).to(tl.float32)
    tl.store(row, (first * cos - second * sin).to(qkv_ptr.dtype.element_ty), mask=ok)
    tl.store(row + HALF, (second * cos + first * sin).to(qkv_ptr.dtype.element_ty), mask=ok)
