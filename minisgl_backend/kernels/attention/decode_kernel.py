"""Kernels of decode attention over the paged KV cache; decode.py says how they work and launches them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.attention.scores import capped, for_cache, sink_logits
from minisgl_backend.kernels.elementwise import to_cache


@triton.jit
def _norm_and_angles(norm_ptr, table_ptr, d, ok, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Arguments of `_rotated`: the norm's weights of both halves, cosines and sines; each shaped like `d`."""
    half: tl.constexpr = HEAD_DIM // 2
    weight = tl.full(d.shape, 1.0, tl.float32)
    partner_weight = weight
    if NORM:
        weight = tl.load(norm_ptr + d, mask=ok, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + tl.where(d < half, d + half, d - half), mask=ok, other=0.0).to(tl.float32)
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(table_ptr + angle, mask=ok, other=0.0)
    sin = tl.load(table_ptr + half + angle, mask=ok, other=0.0)
    return weight, partner_weight, cos, tl.where(d < half, -sin, sin)


@triton.jit
def _head(row_ptr, d, ok, HEAD_DIM: tl.constexpr):
    """The head at row_ptr (a pointer, or pointers [heads, 1]), and the same with its halves swapped."""
    partner = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
    x = tl.load(row_ptr + d, mask=ok, other=0.0).to(tl.float32)
    return x, tl.load(row_ptr + partner, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _rotated(x, partner, weight, partner_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """A `_head` after its norm and the rotation; the arguments come from `_norm_and_angles`."""
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM + eps)
        x = x * scale * weight
        partner = partner * scale * partner_weight
    return x * cos + partner * sin


@triton.jit
def _tile_offsets(table, start, n, last, kv_stride_page, kv_stride_token, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Offsets of the tokens start + n in the cache, int64 [TILE]; beyond `last`, any valid offset."""
    if PAGE_SIZE % TILE == 0:
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
        return page * kv_stride_page + (start % PAGE_SIZE + n) * kv_stride_token
    position = tl.minimum(start + n, last)
    pages = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    return pages * kv_stride_page + (position % PAGE_SIZE) * kv_stride_token


@triton.jit
def _from_words(words, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Splits 16-bit words of two FP8 numbers into the numbers with even and with odd indices.

    Tensor cores need values token by token in a register. One instruction loads many 16-bit words from shared memory in
    that order; single bytes would be loaded one by one.
    """
    if NATIVE:
        even = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0020; mov.b32 {a, b}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0031; mov.b32 {a, b}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        even = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        odd = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _attend_tile(
    q, k, v, n_ok, m, total, acc, acc_odd, scale_log2,
    SOFT_CAP: tl.constexpr, FP8: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax over a tile of keys and values, in the number format of q."""
    scores = capped(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale_log2, SOFT_CAP)
    scores = tl.where(n_ok[None, :], scores, -float("inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    p = tl.exp2(scores - m_new[:, None])
    correction = tl.exp2(m - m_new)
    total = total * correction + tl.sum(p, 1)
    p = p.to(q.dtype)
    if FP8:
        even, odd = _from_words(v, q.dtype, NATIVE)
        acc = acc * correction[:, None] + tl.dot(p, even, input_precision="ieee")
        acc_odd = acc_odd * correction[:, None] + tl.dot(p, odd, input_precision="ieee")
    else:
        acc = acc * correction[:, None] + tl.dot(p, v.to(q.dtype), input_precision="ieee")
    return m_new, total, acc, acc_odd


@triton.jit
def _divided(acc, acc_odd, total, v_scale, FP8: tl.constexpr):
    """acc / total of the softmax, [heads, head_dim]. Computed in each branch that stores it: before both it would cost
    registers, and so occupancy."""
    if FP8:
        return tl.interleave(acc, acc_odd) / total[:, None] * v_scale
    else:
        return acc / total[:, None]


@triton.jit(do_not_specialize=["min_part"])
def decode_kernel(
    q_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, kv_lens_ptr, table_ptr,
    partial_ptr, lse_ptr, counters_ptr, sinks_ptr, shifts_ptr,
    scale_log2, eps, k_inverse, v_inverse, v_scale,
    q_stride, kv_stride_page, kv_stride_head, kv_stride_token, table_stride, min_part,
    NUM_SPLITS: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, HEADS_MERGED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFT_CAP: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program for each part of a sequence."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        if not ROTATE:
            tl_cuda.gdc_wait()
    kv_head = tl.program_id(0)
    b = tl.program_id(1)
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens_ptr + b)
    # With a window, the tokens before `lowest` are not seen; parts begin at the tile that holds it.
    if CHUNKED:
        lowest = (kv_len - 1) // WINDOW * WINDOW
    else:
        lowest = tl.maximum(kv_len - WINDOW, 0) if WINDOW else 0
    origin = lowest // TILE * TILE
    part = tl.maximum(tl.cdiv(kv_len - origin, NUM_SPLITS), min_part)
    part = tl.cdiv(part, TILE) * TILE
    active = tl.cdiv(kv_len - origin, part)
    if split >= active:
        return
    begin = origin + split * part
    _attend_part(
        q_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, table_ptr, partial_ptr, lse_ptr,
        counters_ptr, sinks_ptr, shifts_ptr, scale_log2, eps, k_inverse, v_inverse, v_scale, q_stride, kv_stride_page,
        kv_stride_head, kv_stride_token, table_stride, kv_head, b, kv_len, lowest, begin,
        tl.minimum(begin + part, kv_len), split, active, b * NUM_SPLITS,
        TILE, PAGE_SIZE, GROUP, GROUP_PADDED, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, HEADS_MERGED,
        SPLITS_PADDED, WINDOW, SOFT_CAP, ROTATE, NORM, FP8, LARGEST, NATIVE, EARLY, AT_ONCE, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["batch"])
def balanced_decode_kernel(
    q_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, kv_lens_ptr, table_ptr,
    partial_ptr, lse_ptr, counters_ptr, sinks_ptr, shifts_ptr,
    scale_log2, eps, k_inverse, v_inverse, v_scale,
    q_stride, kv_stride_page, kv_stride_head, kv_stride_token, table_stride, batch,
    MAX_BATCH: tl.constexpr, LEAST_TILES: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, HEADS_MERGED: tl.constexpr, WORKERS_PADDED: tl.constexpr,
    SOFT_CAP: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
    NATIVE: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Persistent programs, each with an equal share of the concatenated tiles of all sequences: it finishes one
    sequence's part, computes whole sequences, and begins another's part."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        if not ROTATE:
            tl_cuda.gdc_wait()
    kv_head = tl.program_id(0)
    worker = tl.program_id(1)
    i = tl.arange(0, MAX_BATCH)
    lens = tl.load(kv_lens_ptr + i, mask=i < batch, other=0)
    ends = tl.cumsum(tl.cdiv(lens, TILE), 0)
    total = tl.max(ends, 0)
    share = tl.maximum(tl.cdiv(total, tl.num_programs(1)), LEAST_TILES)
    tile = worker * share
    stop = tl.minimum(tile + share, total)
    b = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)  # tiles of the sequences before this one
    while tile < stop:
        kv_len = tl.load(kv_lens_ptr + b)
        after = before + tl.cdiv(kv_len, TILE)
        part_stop = tl.minimum(stop, after)
        first = before // share  # the worker that begins this sequence
        _attend_part(
            q_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, table_ptr, partial_ptr,
            lse_ptr, counters_ptr, sinks_ptr, shifts_ptr, scale_log2, eps, k_inverse, v_inverse, v_scale, q_stride,
            kv_stride_page, kv_stride_head, kv_stride_token, table_stride, kv_head, b, kv_len, 0,
            (tile - before) * TILE, tl.minimum((part_stop - before) * TILE, kv_len), worker - first,
            (after - 1) // share - first + 1,
            first + b,  # one worker's parts of two sequences have separate rows
            TILE, PAGE_SIZE, GROUP, GROUP_PADDED, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, HEADS_MERGED,
            WORKERS_PADDED, 0, SOFT_CAP, ROTATE, NORM, FP8, LARGEST, NATIVE, False, AT_ONCE, PDL,
        )  # fmt: skip
        tile = part_stop
        before = after
        b += 1


@triton.jit
def _attend_part(
    q_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, k_ptr, v_ptr, out_ptr, rows_ptr, table_ptr, partial_ptr, lse_ptr,
    counters_ptr, sinks_ptr, shifts_ptr, scale_log2, eps, k_inverse, v_inverse, v_scale, q_stride, kv_stride_page,
    kv_stride_head, kv_stride_token, table_stride, kv_head, b, kv_len, lowest, begin, end, split, active, first_line,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
    HEADS_MERGED: tl.constexpr, SPLITS_PADDED: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ROTATE: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr,
    EARLY: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends to tokens `begin` to `end` of sequence `b`: part `split` of `active` parts, whose results go to the rows
    of the workspace from `first_line` on. `lowest`: the first token inside the window."""
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, HEAD_PADDED)
    n = tl.arange(0, TILE)
    d_ok = d < HEAD_DIM
    # Values of an FP8 cache are read as words of two.
    PER_WORD: tl.constexpr = 2 if FP8 else 1
    w = tl.arange(0, HEAD_PADDED // PER_WORD)
    w_ok = w < HEAD_DIM // PER_WORD
    q_ok = (g[:, None] < GROUP) & d_ok[None, :]
    q_head = kv_head * GROUP + g
    row = tl.load(rows_ptr + b).to(tl.int64)
    table = table_ptr + row * table_stride
    k_head = k_ptr + kv_head * kv_stride_head
    v_head = v_ptr + kv_head * (kv_stride_head // PER_WORD)

    m = tl.full([GROUP_PADDED], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    acc = tl.zeros([GROUP_PADDED, HEAD_PADDED // PER_WORD], tl.float32)
    acc_odd = acc  # for an FP8 cache, where `acc` has the even indices
    cached: tl.constexpr = k_ptr.dtype.element_ty
    q_row = q_ptr + b * q_stride
    if ROTATE:
        position = (kv_len - 1).to(tl.int64)
        turned = position
        if shifts_ptr is not None:  # read while the page table is
            turned += tl.load(shifts_ptr + row)
        # The last token is this step's own: it comes from qkv, everything before it from the cache.
        cached_end = tl.minimum(end, kv_len - 1)
        if EARLY:
            # Lengths, pages and earlier tokens were written before this chain of kernels began (plain/small_rows.py).
            offsets = _tile_offsets(table, begin, n, kv_len - 1, kv_stride_page, kv_stride_token, TILE, PAGE_SIZE)
            early_ok = begin + n < cached_end
            if WINDOW:
                early_ok &= begin + n >= lowest
            k_address, v_address = offsets[:, None] + d[None, :], (offsets // PER_WORD)[:, None] + w[None, :]
            early_k = tl.load(k_head + k_address, mask=early_ok[:, None] & d_ok[None, :], other=0.0)
            early_v = tl.load(v_head + v_address, mask=early_ok[:, None] & w_ok[None, :], other=0)
        # So were the table of angles and the norms' weights, which are no longer in the L2 cache.
        angles = cos_sin_ptr + turned * HEAD_DIM
        q_weight, q_partner_weight, cos, sin = _norm_and_angles(
            q_norm_ptr, angles, d[None, :], d_ok[None, :], HEAD_DIM, NORM
        )
        # Only the last part has the new token. Its additional loads are issued together with those of all parts.
        new_dim = tl.where(split == active - 1, HEAD_DIM, 0)
        new_ok = d[None, :] < new_dim
        k_weight, k_partner_weight, _, _ = _norm_and_angles(k_norm_ptr, angles, d[None, :], new_ok, HEAD_DIM, NORM)
        page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        slot = page * kv_stride_page + (position % PAGE_SIZE) * kv_stride_token
        if PDL:
            tl_cuda.gdc_wait()
        q, q_partner = _head(q_row + q_head[:, None] * HEAD_DIM, d[None, :], q_ok, HEAD_DIM)
        new_k_row = q_row + (NUM_Q_HEADS + kv_head) * HEAD_DIM
        new_v_row = new_k_row + NUM_KV_HEADS * HEAD_DIM
        new_k, new_k_partner = _head(new_k_row, d[None, :], new_ok, HEAD_DIM)
        new_v = tl.load(new_v_row + PER_WORD * w[None, :], mask=w[None, :] < new_dim // PER_WORD, other=0.0)
        q = _rotated(q, q_partner, q_weight, q_partner_weight, cos, sin, eps, HEAD_DIM, NORM)
        q = for_cache(q.to(q_ptr.dtype.element_ty), FP8)
        if split == active - 1:
            key = _rotated(new_k, new_k_partner, k_weight, k_partner_weight, cos, sin, eps, HEAD_DIM, NORM)
            key = to_cache(key.to(q_ptr.dtype.element_ty), k_inverse, cached, LARGEST)
            tl.store(k_head + slot + d[None, :], key, mask=d_ok[None, :])
            value = to_cache(new_v, v_inverse, cached, LARGEST)
            acc += value.to(tl.float32)
            if FP8:
                odd_v = tl.load(new_v_row + PER_WORD * w[None, :] + 1, mask=w_ok[None, :], other=0.0)
                odd_v = to_cache(odd_v, v_inverse, cached, LARGEST)
                acc_odd += odd_v.to(tl.float32)
                low, high = value.to(tl.uint8, bitcast=True), odd_v.to(tl.uint8, bitcast=True)
                value = low.to(tl.int16) | (high.to(tl.int16) << 8)
            tl.store(v_head + slot // PER_WORD + w[None, :], value, mask=w_ok[None, :])
            m = capped(tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale_log2, SOFT_CAP)
            total = tl.full([GROUP_PADDED], 1.0, tl.float32)
        if EARLY:
            m, total, acc, acc_odd = _attend_tile(
                q, early_k, early_v, early_ok, m, total, acc, acc_odd, scale_log2, SOFT_CAP, FP8, NATIVE
            )
            begin += TILE
    else:
        cached_end = end
        q = for_cache(tl.load(q_row + q_head[:, None] * HEAD_DIM + d[None, :], mask=q_ok, other=0.0), FP8)

    for start in tl.range(begin, cached_end, TILE):
        offsets = _tile_offsets(table, start, n, kv_len - 1, kv_stride_page, kv_stride_token, TILE, PAGE_SIZE)
        n_ok = start + n < cached_end
        if WINDOW:
            n_ok &= start + n >= lowest
        k_address, v_address = offsets[:, None] + d[None, :], (offsets // PER_WORD)[:, None] + w[None, :]
        k = tl.load(k_head + k_address, mask=n_ok[:, None] & d_ok[None, :], other=0.0)
        v = tl.load(v_head + v_address, mask=n_ok[:, None] & w_ok[None, :], other=0)
        m, total, acc, acc_odd = _attend_tile(q, k, v, n_ok, m, total, acc, acc_odd, scale_log2, SOFT_CAP, FP8, NATIVE)

    if active == 1:
        if sinks_ptr is not None:
            total += tl.exp2(sink_logits(sinks_ptr, q_head, g < GROUP) - m)
        out_address = (b * NUM_Q_HEADS + q_head[:, None]) * HEAD_DIM + d[None, :]
        result = _divided(acc, acc_odd, total, v_scale, FP8)
        tl.store(out_ptr + out_address, result.to(out_ptr.dtype.element_ty), mask=q_ok)
    else:
        # Store this part's result, then arrive: the program that arrives last merges all parts in part order.
        index = (first_line + split) * NUM_Q_HEADS + q_head
        result = _divided(acc, acc_odd, total, v_scale, FP8)
        tl.store(partial_ptr + index[:, None] * HEAD_DIM + d[None, :], result, mask=q_ok)
        tl.store(lse_ptr + index, m + tl.log2(total), mask=g < GROUP)
        tl.debug_barrier()
        counter = counters_ptr + b * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.store(counter, 0)
            _merge_parts(
                partial_ptr, lse_ptr, out_ptr, sinks_ptr, b, kv_head, active, first_line, NUM_Q_HEADS, HEAD_DIM, GROUP,
                HEADS_MERGED, HEAD_PADDED, SPLITS_PADDED, AT_ONCE,
            )  # fmt: skip


@triton.jit
def _merge_parts(
    partial_ptr, lse_ptr, out_ptr, sinks_ptr, b, kv_head, active, first_part,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    HEAD_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The weighted mean of a sequence's parts, in part order, for the query heads of one KV head.

    AT_ONCE parts are in flight at the same time. They take few registers, since heads are padded to a power of two here
    and not to the 16 of tensor cores. No step of the loop needs another thread's numbers.
    """
    g = tl.arange(0, HEADS)
    d = tl.arange(0, HEAD_PADDED)
    s = tl.arange(0, SPLITS_PADDED)
    first_line = first_part * NUM_Q_HEADS + kv_head * GROUP + g
    g_ok = g < GROUP
    ok = g_ok[:, None] & (d < HEAD_DIM)[None, :]
    lse_ok = (s[None, :] < active) & g_ok[:, None]
    every = tl.load(
        lse_ptr + first_line[:, None] + s[None, :] * NUM_Q_HEADS, mask=lse_ok, other=-float("inf"), cache_modifier=".cg"
    )
    top = tl.maximum(tl.max(every, 1), -1e30)
    if sinks_ptr is not None:
        sink = sink_logits(sinks_ptr, kv_head * GROUP + g, g_ok)
        top = tl.maximum(top, sink)
    weight_sum = tl.sum(tl.exp2(every - top[:, None]), 1)
    if sinks_ptr is not None:
        weight_sum += tl.exp2(sink - top)
    merged = tl.zeros([HEADS, HEAD_PADDED], tl.float32)
    for i in tl.range(0, active, AT_ONCE):
        # All are loaded before any is used: otherwise each load would wait for the previous one.
        parts: tl.tuple = ()
        for j in tl.static_range(AT_ONCE):
            part = _part(partial_ptr, lse_ptr, first_line, i + j, active, g, d, NUM_Q_HEADS, HEAD_DIM, GROUP)
            parts += (part,)
        for j in tl.static_range(AT_ONCE):
            merged += tl.exp2(parts[j][0] - top)[:, None] * parts[j][1]
    weight_sum = tl.where(weight_sum > 0, weight_sum, 1.0)
    address = (b * NUM_Q_HEADS + kv_head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + address, (merged / weight_sum[:, None]).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _part(
    partial_ptr, lse_ptr, first_line, i, active, g, d,
    NUM_Q_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp [heads] and results [heads, head_dim] of part i; -inf and 0 where there is no such part."""
    line = first_line + i * NUM_Q_HEADS
    g_ok = g < tl.where(i < active, GROUP, 0)
    ok = g_ok[:, None] & (d < HEAD_DIM)[None, :]
    lse = tl.load(lse_ptr + line, mask=g_ok, other=-float("inf"), cache_modifier=".cg")
    part = tl.load(partial_ptr + line[:, None] * HEAD_DIM + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
    return lse, part
