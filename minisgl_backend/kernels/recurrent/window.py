"""`reference.delta_window` in the Triton language, bound by the bytes of states.

A program has one row and one value head, whose state it streams once, through shared memory, in tiles of some of its
values, several ahead. Where a row may have drafts, all its entries are computed of each tile, so that drafts cost no
state. For one entry, products are float32 FMA on purpose: tensor cores in TF32 would lose three digits, and
bytes take longer. For several they are tensor cores' after all, of float32 numbers in two 16-bit halves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.recurrent.calls import L2_EPS, DeltaLayer, WindowBatch
from minisgl_backend.kernels.recurrent.parts import log_decay, pair_dot, silu
from minisgl_backend.kernels.shared_memory import stages_that_fit
from minisgl_backend.kv.state_config import StateConfig

_TILE = 32  # values of a tile
_LEAST_DOT = 16  # of a side of a product on tensor cores


class StreamShape(NamedTuple):
    """How a state is streamed."""

    tile: int  # of its values
    num_warps: int
    num_stages: int  # tiles in flight, and one


def stream_shape(few: bool, config: StateConfig, page_size: int, shared: int) -> StreamShape:
    """few: all programs run at once. Then four warps end sooner; else each program is one warp, which waits for no
    other. Five of either fit a multiprocessor."""
    rows, tile = next_power_of_2(config.k_dim), min(_TILE, next_power_of_2(config.v_dim))
    tail = next_power_of_2(page_size)
    num_warps = max(1, min(4, rows * tile // 1024)) if few else max(1, rows // 128, tail // 32)
    stages = stages_that_fit(3, 4 * tile * (rows + tail), shared // 5)
    return StreamShape(tile, num_warps, max(2, stages))


def delta_window(
    x: torch.Tensor,
    layer: DeltaLayer,
    batch: WindowBatch,
    out: torch.Tensor | None = None,
    shape: StreamShape | None = None,
) -> torch.Tensor:
    """As `reference.delta_window`; rows of x may be strided. shape: another than the chosen one."""
    config, state, num_entries = layer.config, layer.state, len(x)
    out = x.new_empty((num_entries, config.num_v_heads * config.v_dim)) if out is None else out
    if num_entries == 0:
        return out
    if shape is None:
        facts = DeviceFacts.of(x.device)
        few = batch.has_drafts or num_entries * config.num_v_heads <= 2 * facts.multiprocessors
        shape = stream_shape(few, config, layer.page_size, facts.shared_memory)
    tensors = (
        x, out, batch.rows, batch.kv_lens, batch.state_slot, batch.state_border, state.states, state.tail_k,
        state.tail_u, state.tail_g, state.tail_conv, layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight,
        layer.norm_eps, layer.beta_scale, config.k_dim**-0.5, L2_EPS, x.stride(0),
    )  # fmt: skip
    sizes = {
        "HK": config.num_k_heads, "HV": config.num_v_heads, "DK": config.k_dim,
        "DK_PADDED": next_power_of_2(config.k_dim), "DV": config.v_dim, "TILE": shape.tile,
        "TILES": next_power_of_2(config.v_dim) // shape.tile, "WIDTH": config.conv_width,
        "LENGTH": state.tail_u.shape[2], "RING": state.tail_conv.shape[1], "STAGES": shape.num_stages,
        "num_warps": shape.num_warps, **pdl_options(batch.pdl),
    }  # fmt: skip
    grid, tail = (config.num_v_heads, num_entries), next_power_of_2(layer.page_size)
    if not batch.has_drafts:
        _streaming_kernel[grid](*tensors, TAIL=tail, **sizes)
        return out
    entries = next_power_of_2(1 + layer.max_drafts)
    _drafts_kernel[grid](
        *tensors, num_entries, TAIL=max(_LEAST_DOT, tail), ENTRIES=entries, ROWS=max(_LEAST_DOT, 2 * entries), **sizes
    )
    return out


@triton.jit
def _streaming_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One entry a row. TILE: of a state's values, of which there are TILES; TAIL: at least the tokens of a page."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + entry)
    slot = tl.load(slot_ptr + row)
    position = tl.load(lens_ptr + entry) - 1
    border = tl.load(border_ptr + row)
    num_tail = tl.where(slot > 0, position - border, 0)
    C: tl.constexpr = 2 * HK * DK + HV * DV
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
    token_ptr = x_ptr + entry.to(tl.int64) * x_stride
    q_channel = key_head * DK + d
    k_channel = HK * DK + q_channel
    tiles = tl.arange(0, TILES)
    lanes = tl.arange(0, TILE)
    e = tiles[:, None] * TILE + lanes[None, :]
    e_ok = e < DV
    v_channel = 2 * HK * DK + head * DV + e
    norm = tl.load(norm_ptr + e, mask=e_ok, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    if PDL:
        tl_cuda.gdc_wait()
    q = _convolved(token_ptr, ring_ptr, weight_ptr, q_channel, d, DK, position, 0, x_stride, C, WIDTH, RING)
    k = _convolved(token_ptr, ring_ptr, weight_ptr, k_channel, d, DK, position, 0, x_stride, C, WIDTH, RING)
    v = _convolved(token_ptr, ring_ptr, weight_ptr, v_channel, e, DV, position, 0, x_stride, C, WIDTH, RING)
    b = tl.load(token_ptr + C + HV * DV + head).to(tl.float32)
    a = tl.load(token_ptr + C + HV * DV + HV + head).to(tl.float32)
    g = log_decay(a, a_log, dt_bias)
    beta = beta_scale / (1.0 + tl.exp(-b))
    # Appended: nothing of this row that this launch reads.
    place = position % LENGTH
    tl.store(g_ptr + place, g)
    place_ptr = ring_ptr + (position % RING) * C
    tl.store(place_ptr + v_channel, tl.load(token_ptr + v_channel, mask=e_ok, other=0.0), mask=e_ok)
    if head % (HV // HK) == 0:
        tl.store(k_ptr + place * DK + d, k.to(tail_k_ptr.dtype.element_ty), mask=d_ok)
        tl.store(place_ptr + q_channel, tl.load(token_ptr + q_channel, mask=d_ok, other=0.0), mask=d_ok)
        tl.store(place_ptr + k_channel, tl.load(token_ptr + k_channel, mask=d_ok, other=0.0), mask=d_ok)
    q = q * (q_scale * tl.rsqrt(tl.sum(q * q, 0) + l2_eps))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    qk = tl.sum(q * k, 0)
    total = tl.sum(tail_g, 0) + g
    wide_k = tail_k.to(tl.float32)
    weight = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + l2_eps) * tl.exp(total - tl.cumsum(tail_g, 0))
    weight_k = weight * tl.sum(wide_k * k[None, :], 1)
    weight_q = weight * tl.sum(wide_k * q[None, :], 1)
    decay = tl.exp(total)
    k = decay * k
    q = decay * q
    out = tl.zeros([TILES, TILE], tl.float32)
    d_limit = tl.where(slot > 0, DK, 0)
    for n in tl.range(0, TILES, num_stages=STAGES):
        c = n * TILE + lanes
        state, tail_u = _tile(states_ptr, u_ptr, c, d, d_limit, j_at, j_ok, DV)
        seen_k = tl.sum(state * k[:, None], 0) + tl.sum(tail_u * weight_k[:, None], 0)
        seen_q = tl.sum(state * q[:, None], 0) + tl.sum(tail_u * weight_q[:, None], 0)
        u = beta * (tl.sum(tl.where(tiles[:, None] == n, v, 0.0), 0) - seen_k)
        tl.store(u_ptr + place * DV + c, u, mask=c < DV)
        out = tl.where(tiles[:, None] == n, (seen_q + qk * u)[None, :], out)
    number: tl.constexpr = out_ptr.dtype.element_ty
    out = out.to(number).to(tl.float32)
    z = tl.load(token_ptr + C + head * DV + e, mask=e_ok, other=0.0).to(tl.float32)
    out = (out * tl.rsqrt(tl.sum(tl.sum(out * out, 1), 0) / DV + eps) * norm).to(number).to(tl.float32)
    tl.store(out_ptr + (entry.to(tl.int64) * HV + head) * DV + e, (out * silu(z)).to(number), mask=e_ok)


@triton.jit(do_not_specialize=["num_entries"])
def _drafts_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    num_entries, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr,
    RING: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_streaming_kernel`, of up to ENTRIES entries of a row. Matrices of ROWS rows have the keys of all of them,
    then their queries."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + entry)
    slot = tl.load(slot_ptr + row)
    # A row's first entry has a program for all of them; each entry that pads the batch has its own.
    before = tl.load(rows_ptr + entry - 1, mask=entry > 0, other=-1)
    if (before == row) & (slot > 0):
        return
    i = tl.arange(0, ENTRIES)
    rows = tl.load(rows_ptr + entry + i, mask=entry + i < num_entries, other=-1)
    count = tl.where(slot > 0, tl.sum((rows == row).to(tl.int32), 0), 1)
    first = tl.load(lens_ptr + entry) - 1
    border = tl.load(border_ptr + row)
    num_tail = tl.where(slot > 0, first - border, 0)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    number: tl.constexpr = tail_k_ptr.dtype.element_ty
    key_head = head // (HV // HK)
    row_64 = row.to(tl.int64)
    d = tl.arange(0, DK_PADDED)
    d_ok = d < DK
    j = tl.arange(0, TAIL)
    j_ok = j < num_tail
    j_at = (border + j) % LENGTH
    r = tl.arange(0, ROWS)
    n_of_r = r % ENTRIES
    is_q = r >= ENTRIES
    r_ok = (r < 2 * ENTRIES) & (n_of_r < count)
    u_ptr = tail_u_ptr + (row_64 * HV + head) * (LENGTH * DV)
    k_ptr = tail_k_ptr + (row_64 * HK + key_head) * (LENGTH * DK)
    g_ptr = tail_g_ptr + (row_64 * HV + head) * LENGTH
    ring_ptr = tail_conv_ptr + row_64 * (RING * C)
    states_ptr += (slot.to(tl.int64) * HV + head) * (DK * DV)
    tail_k = tl.load(k_ptr + j_at[:, None] * DK + d[None, :], mask=j_ok[:, None] & d_ok[None, :], other=0.0)
    tail_g = tl.load(g_ptr + j_at, mask=j_ok, other=0.0)
    x_ptr += entry.to(tl.int64) * x_stride
    kq_channel = (key_head * DK + d)[None, :] + tl.where(is_q, 0, HK * DK)[:, None]
    kq_ok = r_ok[:, None] & d_ok[None, :]
    e = tl.arange(0, TILES * TILE)
    v_channel = (2 * HK * DK + head * DV + e)[None, :]
    v_ok = (i < count)[:, None] & (e < DV)[None, :]
    if PDL:
        tl_cuda.gdc_wait()
    kq = _convolved_rows(x_ptr, ring_ptr, weight_ptr, kq_channel, kq_ok, n_of_r, first, x_stride, C, WIDTH, RING)
    v = _convolved_rows(x_ptr, ring_ptr, weight_ptr, v_channel, v_ok, i, first, x_stride, C, WIDTH, RING)
    gates_ptr = x_ptr + i * x_stride + C + HV * DV + head
    b = tl.load(gates_ptr, mask=i < count, other=0.0).to(tl.float32)
    a = tl.load(gates_ptr + HV, mask=i < count, other=0.0).to(tl.float32)
    beta = beta_scale / (1.0 + tl.exp(-b))
    g = tl.where(i < count, log_decay(a, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)), 0.0)
    # Appended: nothing of this row that this launch reads.
    tl.store(g_ptr + (first + i) % LENGTH, g, mask=i < count)
    raw_v = tl.load(x_ptr + (i * x_stride)[:, None] + v_channel, mask=v_ok, other=0.0)
    tl.store(ring_ptr + ((first + i) % RING * C)[:, None] + v_channel, raw_v, mask=v_ok)
    if head % (HV // HK) == 0:
        raw_kq = tl.load(x_ptr + (n_of_r * x_stride)[:, None] + kq_channel, mask=kq_ok, other=0.0)
        tl.store(ring_ptr + ((first + n_of_r) % RING * C)[:, None] + kq_channel, raw_kq, mask=kq_ok)
        k_at = ((first + n_of_r) % LENGTH * DK)[:, None] + d[None, :]
        tl.store(k_ptr + k_at, kq.to(number), mask=kq_ok & (r < ENTRIES)[:, None])
    kq = kq * (tl.rsqrt(tl.sum(kq * kq, 1) + l2_eps) * tl.where(is_q, q_scale, 1.0))[:, None]
    before_g = tl.sum(tail_g, 0)
    total = before_g + tl.sum(tl.where(i[None, :] <= n_of_r[:, None], g[None, :], 0.0), 1)
    wide_k = tail_k.to(tl.float32)
    norm_k = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + l2_eps)
    decay = tl.exp(total[:, None] - tl.cumsum(tail_g, 0)[None, :])
    weight = pair_dot(kq, tl.trans(wide_k), number) * norm_k[None, :] * decay
    own = pair_dot(kq, tl.trans(kq), number)
    kq = kq * tl.exp(total)[:, None]
    tiles = tl.arange(0, TILES)
    lanes = tl.arange(0, TILE)
    v = tl.reshape(v, [ENTRIES, TILES, TILE])
    out = tl.zeros([ENTRIES, TILES, TILE], tl.float32)
    d_limit = tl.where(slot > 0, DK, 0)
    for t in tl.range(0, TILES, num_stages=STAGES):
        c = t * TILE + lanes
        state, tail_u = _tile(states_ptr, u_ptr, c, d, d_limit, j_at, j_ok, DV)
        seen = pair_dot(kq, state, number) + pair_dot(weight, tail_u, number)
        v_tile = tl.sum(tl.where((tiles == t)[None, :, None], v, 0.0), 1)
        for n in tl.static_range(ENTRIES):
            # Each entry's u, and what later entries, and its own query, see of it.
            mine = i == n
            u = tl.sum(tl.where((r == n)[:, None], -seen, 0.0), 0) + tl.sum(tl.where(mine[:, None], v_tile, 0.0), 0)
            u = tl.sum(tl.where(mine, beta, 0.0), 0) * u
            sees = (n_of_r > n) | (is_q & (n_of_r == n))
            at = before_g + tl.sum(tl.where(i <= n, g, 0.0), 0)
            of_u = tl.sum(tl.where((r == n)[None, :], own, 0.0), 1)
            of_u = tl.where(sees, of_u * tl.exp(tl.where(sees, total - at, 0.0)), 0.0)
            seen += of_u[:, None] * u[None, :]
            tl.store(u_ptr + (first + n) % LENGTH * DV + c, u, mask=c < tl.where(count > n, DV, 0))
        for n in tl.static_range(ENTRIES):
            o = tl.sum(tl.where((r == ENTRIES + n)[:, None], seen, 0.0), 0)
            out = tl.where((i == n)[:, None, None] & (tiles == t)[None, :, None], o[None, None, :], out)
    result: tl.constexpr = out_ptr.dtype.element_ty
    out = tl.reshape(out, [ENTRIES, TILES * TILE]).to(result).to(tl.float32)
    norm = tl.load(norm_ptr + e, mask=e < DV, other=0.0).to(tl.float32)
    z = tl.load(x_ptr + (i * x_stride)[:, None] + (C + head * DV + e)[None, :], mask=v_ok, other=0.0).to(tl.float32)
    out = (out * tl.rsqrt(tl.sum(out * out, 1) / DV + eps)[:, None] * norm[None, :]).to(result).to(tl.float32)
    out_ptr += (entry.to(tl.int64) * HV + head) * DV
    tl.store(out_ptr + (i * (HV * DV))[:, None] + e[None, :], (out * silu(z)).to(result), mask=v_ok)


@triton.jit
def _convolved_rows(
    x_ptr, ring_ptr, weight_ptr, channel, ok, n, first, x_stride, C: tl.constexpr, WIDTH: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """As `_convolved`, for some channels of each of the entries n."""
    token_ptr = x_ptr + (n * x_stride)[:, None]
    total = tl.load(token_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    total *= tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=ok, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        at = first + n - back
        kept_ptr = ring_ptr + ((at + RING) % RING * C)[:, None]
        kept = tl.load(kept_ptr + channel, mask=ok & ((at >= 0) & (back > n))[:, None], other=0.0)
        new = tl.load(token_ptr - back * x_stride + channel, mask=ok & (back <= n)[:, None], other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=ok, other=0.0).to(tl.float32)
        total += tl.where((back > n)[:, None], kept, new).to(tl.float32) * weight
    return silu(total).to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _tile(states_ptr, u_ptr, c, d, d_limit, j_at, j_ok, DV: tl.constexpr):
    """Some values of a state, zeros where there is none (d_limit is 0), and of its tail."""
    c_ok = (c < DV)[None, :]
    state_ptr = states_ptr + d[:, None] * DV + c[None, :]
    state = tl.load(state_ptr, mask=(d < d_limit)[:, None] & c_ok, other=0.0, eviction_policy="evict_first")
    return state, tl.load(u_ptr + j_at[:, None] * DV + c[None, :], mask=j_ok[:, None] & c_ok, other=0.0)


@triton.jit
def _convolved(
    token_ptr, ring_ptr, weight_ptr, channel, lane, size, position, n, x_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of some channels, the first `size` lanes, rounded as the tail holds it, in float32. The
    row's n earlier entries of the step are before the token; those before them in the ring."""
    ok = lane < size
    total = tl.load(token_ptr + channel, mask=ok, other=0.0).to(tl.float32)
    total *= tl.load(weight_ptr + channel * WIDTH + WIDTH - 1, mask=ok, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        at = position - back
        is_kept = (at >= 0) & (back > n)
        kept = tl.load(ring_ptr + (at % RING) * C + channel, mask=lane < tl.where(is_kept, size, 0), other=0.0)
        new = tl.load(token_ptr - back * x_stride + channel, mask=lane < tl.where(back > n, 0, size), other=0.0)
        weight = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - back, mask=ok, other=0.0).to(tl.float32)
        total += tl.where(back > n, kept, new).to(tl.float32) * weight
    return silu(total).to(token_ptr.dtype.element_ty).to(tl.float32)
