"""The window of rows that may have drafts: all entries of a row are computed of the state that is read once, so that
drafts cost no state. It is streamed in tiles of values; the first are on their way while convolutions and the tail are
computed, in the loop's first step. Products are tensor cores' here: keys and queries are numbers of the model's dtype,
exact in products, and float32 numbers two 16-bit halves."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.recurrent.parts import halves, log_decay, pair_dot, silu

LEAST_DOT = 16  # of a side of a product on tensor cores


@triton.jit(do_not_specialize=["num_entries"])
def drafts_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    num_entries, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr,
    DV: tl.constexpr, DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr,
    RING: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `window._rows_kernel`, of up to ENTRIES entries of a row. Matrices of ROWS rows have the keys of all of
    them, then their queries."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + entry)
    slot = tl.load(slot_ptr + row)
    result: tl.constexpr = out_ptr.dtype.element_ty
    e = tl.arange(0, DV_PADDED)
    out_ptr += (entry.to(tl.int64) * HV + head) * DV
    if slot == 0:  # it pads the batch
        if PDL:
            tl_cuda.gdc_wait()
        tl.store(out_ptr + e, tl.zeros([DV_PADDED], result), mask=e < DV)
        return
    # A row's first entry has a program for all of them.
    if tl.load(rows_ptr + entry - 1, mask=entry > 0, other=-1) == row:
        return
    i = tl.arange(0, ENTRIES)
    rows = tl.load(rows_ptr + entry + i, mask=entry + i < num_entries, other=-1)
    count = tl.sum((rows == row).to(tl.int32), 0)
    first = tl.load(lens_ptr + entry) - 1
    border = tl.load(border_ptr + row)
    num_tail = first - border
    C: tl.constexpr = 2 * HK * DK + HV * DV
    number: tl.constexpr = tail_k_ptr.dtype.element_ty
    key_head = head // (HV // HK)
    row_64 = row.to(tl.int64)
    d = tl.arange(0, DK_PADDED)
    d_ok = d < DK
    j = tl.arange(0, TAIL)
    j_ok = j < num_tail
    j_at = (border + j) % LENGTH
    u_ptr = tail_u_ptr + (row_64 * HV + head) * (LENGTH * DV)
    k_ptr = tail_k_ptr + (row_64 * HK + key_head) * (LENGTH * DK)
    g_ptr = tail_g_ptr + (row_64 * HV + head) * LENGTH
    ring_ptr = tail_conv_ptr + row_64 * (RING * C)
    states_ptr += (slot.to(tl.int64) * HV + head) * (DK * DV)
    tail_k = tl.load(k_ptr + j_at[:, None] * DK + d[None, :], mask=j_ok[:, None] & d_ok[None, :], other=0.0)
    tail_g = tl.load(g_ptr + j_at, mask=j_ok, other=0.0)
    wide_k = tail_k.to(tl.float32)
    norm_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + l2_eps)
    before_g = tl.sum(tail_g, 0)
    sums = tl.cumsum(tail_g, 0)
    r = tl.arange(0, ROWS)
    n_of_r = r % ENTRIES
    is_q = r >= ENTRIES
    r_ok = (r < 2 * ENTRIES) & (n_of_r < count)
    x_ptr += entry.to(tl.int64) * x_stride
    kq_channel = (key_head * DK + d)[None, :] + tl.where(is_q, 0, HK * DK)[:, None]
    kq_ok = r_ok[:, None] & d_ok[None, :]
    v_channel = (2 * HK * DK + head * DV + e)[None, :]
    v_ok = (i < count)[:, None] & (e < DV)[None, :]
    gates_ptr = x_ptr + i * x_stride + C + HV * DV + head
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    TILES: tl.constexpr = DV_PADDED // TILE
    tiles = tl.arange(0, TILES)
    seen = tl.zeros([ROWS, TILES, TILE], tl.float32)
    kq = tl.zeros([ROWS, DK_PADDED], number)
    weight = tl.zeros([ROWS, TAIL], tl.float32)
    grown = tl.zeros([ROWS], tl.float32)
    for t in tl.range(0, TILES, num_stages=STAGES):
        c = t * TILE + tl.arange(0, TILE)[None, :]
        state = tl.load(states_ptr + d[:, None] * DV + c, mask=d_ok[:, None] & (c < DV), other=0.0)
        tail_u = tl.load(u_ptr + j_at[:, None] * DV + c, mask=j_ok[:, None] & (c < DV), other=0.0)
        if t == 0:  # while the first tiles come
            if PDL:
                tl_cuda.gdc_wait()
            raw_kq, kq = _convolved_rows(
                x_ptr, ring_ptr, weight_ptr, kq_channel, kq_ok, n_of_r, first, x_stride, C, WIDTH, RING
            )
            a = tl.load(gates_ptr + HV, mask=i < count, other=0.0).to(tl.float32)
            g = tl.where(i < count, log_decay(a, a_log, dt_bias), 0.0)
            tl.store(g_ptr + (first + i) % LENGTH, g, mask=i < count)
            if head % (HV // HK) == 0:
                tl.store(ring_ptr + ((first + n_of_r) % RING * C)[:, None] + kq_channel, raw_kq, mask=kq_ok)
                k_at = ((first + n_of_r) % LENGTH * DK)[:, None] + d[None, :]
                tl.store(k_ptr + k_at, kq, mask=kq_ok & (r < ENTRIES)[:, None])
            total = before_g + tl.sum(tl.where(i[None, :] <= n_of_r[:, None], g[None, :], 0.0), 1)
            grown = tl.exp(total)
            weight = norm_k[None, :] * tl.exp(total[:, None] - sums[None, :]) * _exact_dot(kq, tl.trans(tail_k))
        if number == tl.float32:
            part = tl.dot(kq, state, input_precision="tf32x3")
        else:
            high, low = halves(state, number)
            part = tl.dot(kq, high, tl.dot(kq, low))
        part = part * grown[:, None] + pair_dot(weight, tail_u, number)
        seen = tl.where((tiles == t)[None, :, None], part[:, None, :], seen)
    seen = tl.reshape(seen, [ROWS, DV_PADDED])
    raw_v, v = _convolved_rows(x_ptr, ring_ptr, weight_ptr, v_channel, v_ok, i, first, x_stride, C, WIDTH, RING)
    b = tl.load(gates_ptr, mask=i < count, other=0.0).to(tl.float32)
    a = tl.load(gates_ptr + HV, mask=i < count, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + (i * x_stride)[:, None] + (C + head * DV + e)[None, :], mask=v_ok, other=0.0).to(tl.float32)
    beta = beta_scale / (1.0 + tl.exp(-b))
    g = tl.where(i < count, log_decay(a, a_log, dt_bias), 0.0)
    tl.store(ring_ptr + ((first + i) % RING * C)[:, None] + v_channel, raw_v, mask=v_ok)
    wide_kq = kq.to(tl.float32)
    norm_kq = tl.rsqrt(tl.sum(wide_kq * wide_kq, 1) + l2_eps) * tl.where(is_q, q_scale, 1.0)
    total = before_g + tl.sum(tl.where(i[None, :] <= n_of_r[:, None], g[None, :], 0.0), 1)
    own = _exact_dot(kq, tl.trans(kq)) * norm_kq[:, None] * norm_kq[None, :]
    seen *= norm_kq[:, None]
    for n in tl.static_range(ENTRIES):
        # Each entry's u, and what later entries, and its own query, see of it.
        mine = i == n
        u = tl.sum(tl.where(mine[:, None], v, 0.0), 0) - tl.sum(tl.where((r == n)[:, None], seen, 0.0), 0)
        u = tl.sum(tl.where(mine, beta, 0.0), 0) * u
        sees = (n_of_r > n) | (is_q & (n_of_r == n))
        at = before_g + tl.sum(tl.where(i <= n, g, 0.0), 0)
        of_u = tl.sum(tl.where((r == n)[None, :], own, 0.0), 1)
        of_u = tl.where(sees, of_u * tl.exp(tl.where(sees, total - at, 0.0)), 0.0)
        seen += of_u[:, None] * u[None, :]
        tl.store(u_ptr + (first + n) % LENGTH * DV + e, u, mask=e < tl.where(count > n, DV, 0))
    # Rows of queries become rows of entries.
    picked = tl.where((r[None, :] == (i + ENTRIES)[:, None])[:, :, None], seen[None, :, :], 0.0)
    out = tl.sum(picked, 1).to(result).to(tl.float32)
    norm = tl.load(norm_ptr + e, mask=e < DV, other=0.0).to(tl.float32)
    out = (out * tl.rsqrt(tl.sum(out * out, 1) / DV + eps)[:, None] * norm[None, :]).to(result).to(tl.float32)
    tl.store(out_ptr + (i * (HV * DV))[:, None] + e[None, :], (out * silu(z)).to(result), mask=v_ok)


@triton.jit
def _exact_dot(a, b):
    """a @ b of matrices in the model's dtype, whose products are exact."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _convolved_rows(
    x_ptr, ring_ptr, weight_ptr, channel, ok, n, first, x_stride, C: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """As `window._convolved`, for some channels of each of the entries n; in the model's dtype."""
    token_ptr = x_ptr + (n * x_stride)[:, None]
    weight_ptr += (WIDTH - 1) * C + channel
    raw = tl.load(token_ptr + channel, mask=ok, other=0.0)
    total = raw.to(tl.float32) * tl.load(weight_ptr, mask=ok, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        at = first + n - back
        kept_ptr = ring_ptr + ((at + RING) % RING * C)[:, None]
        kept = tl.load(kept_ptr + channel, mask=ok & ((at >= 0) & (back > n))[:, None], other=0.0)
        new = tl.load(token_ptr - back * x_stride + channel, mask=ok & (back <= n)[:, None], other=0.0)
        weight = tl.load(weight_ptr - back * C, mask=ok, other=0.0).to(tl.float32)
        total += tl.where((back > n)[:, None], kept, new).to(tl.float32) * weight
    return raw, silu(total).to(x_ptr.dtype.element_ty)
