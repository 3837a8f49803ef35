"""`reference.delta_window` in the Triton language, bound by the bytes of states.

A program has one row and one value head. Of few rows, it has several warps and reads the whole state at once, into
registers. Of many, it is one warp, which waits for no other, and each of its threads has some values of every row of
the state: so sums over keys take no exchange. It reads some rows ahead; eight programs fit a multiprocessor, and some
read while others compute. Products are float32 FMA on purpose: tensor cores in TF32 would lose three digits, and bytes
take longer. Rows that may have drafts: see `window_drafts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.recurrent.calls import L2_EPS, DeltaLayer, WindowBatch
from minisgl_backend.kernels.recurrent.parts import log_decay, silu
from minisgl_backend.kernels.recurrent.window_drafts import LEAST_DOT, drafts_kernel
from minisgl_backend.kv.state_config import StateConfig

_TILE, _STAGES = 32, 3  # of drafts: values of a streamed tile; tiles in flight, and one
_WARPS = 4  # of a program that reads a whole state, at most
_TILE_NUMBERS, _PART_NUMBERS = 2048, 1024  # of a state's rows that are read at once, and of a tail's


def whole_warps(config: StateConfig) -> int:
    """Warps of a program that holds a whole state: 128 numbers are a thread's."""
    return max(1, next_power_of_2(config.k_dim) * next_power_of_2(config.v_dim) // 4096)


def row_tiles(config: StateConfig) -> tuple[int, int]:
    """Rows of a state that a program of one warp reads at once, twice, and tokens of a tail."""
    k_padded, v_padded = next_power_of_2(config.k_dim), next_power_of_2(config.v_dim)
    part = max(1, _PART_NUMBERS // max(k_padded, v_padded))
    return max(1, min(_TILE_NUMBERS // v_padded, k_padded // 2)), min(part, 32)


def delta_window(
    x: torch.Tensor,
    layer: DeltaLayer,
    batch: WindowBatch,
    out: torch.Tensor | None = None,
    streams: bool | None = None,
) -> torch.Tensor:
    """As `reference.delta_window`; rows of x may be strided. streams: whether a state is read row by row; None: where
    there are more states than multiprocessors."""
    config, state, num_entries = layer.config, layer.state, len(x)
    out = x.new_empty((num_entries, config.num_v_heads * config.v_dim)) if out is None else out
    if num_entries == 0:
        return out
    tensors = (
        x, out, batch.rows, batch.kv_lens, batch.state_slot, batch.state_border, state.states, state.tail_k,
        state.tail_u, state.tail_g, state.tail_conv, layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight,
        layer.norm_eps, layer.beta_scale, config.k_dim**-0.5, L2_EPS, x.stride(0),
    )  # fmt: skip
    sizes = {
        "HK": config.num_k_heads, "HV": config.num_v_heads, "DK": config.k_dim, "DV": config.v_dim,
        "WIDTH": config.conv_width, "LENGTH": state.tail_u.shape[2], "RING": state.tail_conv.shape[1],
    }  # fmt: skip
    pdl = pdl_options(batch.pdl)
    grid, tail = (config.num_v_heads, num_entries), next_power_of_2(layer.page_size)
    k_padded, v_padded, warps = next_power_of_2(config.k_dim), next_power_of_2(config.v_dim), whole_warps(config)
    if batch.has_drafts:
        entries, tile = next_power_of_2(1 + layer.max_drafts), max(LEAST_DOT, min(_TILE, v_padded))
        drafts_kernel[grid](
            *tensors, num_entries, DK_PADDED=max(LEAST_DOT, k_padded), DV_PADDED=max(tile, v_padded), TILE=tile,
            TAIL=max(LEAST_DOT, tail), ENTRIES=entries, ROWS=max(LEAST_DOT, 2 * entries), STAGES=_STAGES, num_warps=2,
            **sizes, **pdl,
        )  # fmt: skip
        return out
    if streams is None:
        streams = num_entries * config.num_v_heads > DeviceFacts.of(x.device).multiprocessors or warps > _WARPS
    if not streams:
        _whole_kernel[grid](
            *tensors, DK_PADDED=max(warps, k_padded), DV_PADDED=v_padded, TAIL=max(warps, tail), WARPS=warps,
            num_warps=warps, **sizes, **pdl,
        )  # fmt: skip
        return out
    rows, part = row_tiles(config)
    _rows_kernel[grid](
        *tensors, DK_PADDED=k_padded, DV_PADDED=v_padded, TAIL=tail, ROWS=rows, PART=part, num_warps=1, **sizes, **pdl,
    )  # fmt: skip
    return out


@triton.jit
def _whole_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For few rows: all of a state is in registers, on its way before the kernel waits for the previous one. A warp has
    some of the keys of a state, and some tokens of the tail, with all values. TAIL: at least the tokens of a page."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + entry)
    position = tl.load(lens_ptr + entry) - 1
    slot = tl.load(slot_ptr + row)
    border = tl.load(border_ptr + row)
    number: tl.constexpr = out_ptr.dtype.element_ty
    e = tl.arange(0, DV_PADDED)
    e_ok = e < DV
    out_ptr += (entry.to(tl.int64) * HV + head) * DV + e
    if slot == 0:  # it pads the batch
        if PDL:
            tl_cuda.gdc_wait()
        tl.store(out_ptr, tl.zeros([DV_PADDED], number), mask=e_ok)
        return
    num_tail = position - border
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PART: tl.constexpr = DK_PADDED // WARPS
    TOKENS: tl.constexpr = TAIL // WARPS
    key_head = head // (HV // HK)
    row_64 = row.to(tl.int64)
    u_ptr = tail_u_ptr + (row_64 * HV + head) * (LENGTH * DV)
    k_ptr = tail_k_ptr + (row_64 * HK + key_head) * (LENGTH * DK)
    g_ptr = tail_g_ptr + (row_64 * HV + head) * LENGTH
    ring_ptr = tail_conv_ptr + row_64 * (RING * C)
    warp = tl.arange(0, WARPS)
    d_of = warp[:, None] * PART + tl.arange(0, PART)[None, :]
    state_ptr = states_ptr + (slot.to(tl.int64) * HV + head) * (DK * DV) + d_of[:, :, None] * DV + e[None, None, :]
    if DK == DK_PADDED and DV == DV_PADDED:
        state = tl.load(state_ptr, eviction_policy="evict_first")
    else:
        state = tl.load(state_ptr, mask=(d_of < DK)[:, :, None] & e_ok[None, None, :], other=0.0)
    j_of = warp[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    u_at = u_ptr + ((border + j_of) % LENGTH)[:, :, None] * DV + e[None, None, :]
    tail_u = tl.load(u_at, mask=(j_of < num_tail)[:, :, None] & e_ok[None, None, :], other=0.0)
    d = tl.arange(0, DK_PADDED)
    d_ok = d < DK
    j = tl.arange(0, TAIL)
    j_ok = j < num_tail
    j_at = (border + j) % LENGTH
    tail_k = tl.load(k_ptr + j_at[:, None] * DK + d[None, :], mask=j_ok[:, None] & d_ok[None, :], other=0.0)
    tail_g = tl.load(g_ptr + j_at, mask=j_ok, other=0.0)
    norm = tl.load(norm_ptr + e, mask=e_ok, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    tail_k = tail_k.to(tl.float32)
    norm_k = tl.rsqrt(tl.sum(tail_k * tail_k, 1) + l2_eps)
    sums = tl.cumsum(tail_g, 0)
    token_ptr = x_ptr + entry.to(tl.int64) * x_stride
    if PDL:
        tl_cuda.gdc_wait()
    q, k, v, z, g, beta = _appended(
        token_ptr, ring_ptr, k_ptr, g_ptr, weight_ptr, head, position, a_log, dt_bias, beta_scale, d, e, HK, HV, DK, DV,
        WIDTH, LENGTH, RING,
    )  # fmt: skip
    place = position % LENGTH
    # Keys and queries are normed last: products do not wait for it.
    weight_k = tl.sum(tail_k * k[None, :], 1)
    weight_q = tl.sum(tail_k * q[None, :], 1)
    norm_q = q_scale * tl.rsqrt(tl.sum(q * q, 0) + l2_eps)
    own_norm = tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    total = tl.sum(tail_g, 0) + g
    weight = norm_k * tl.exp(total - sums)
    decay = tl.exp(total)
    seen_k = decay * _product(k, state, PART, WARPS) + _product(weight * weight_k, tail_u, TOKENS, WARPS)
    seen_q = decay * _product(q, state, PART, WARPS) + _product(weight * weight_q, tail_u, TOKENS, WARPS)
    u = beta * (v - own_norm * tl.sum(seen_k, 0))
    tl.store(u_ptr + place * DV + e, u, mask=e_ok)
    out = norm_q * (tl.sum(seen_q, 0) + (own_norm * tl.sum(q * k, 0)) * u)
    out = out.to(number).to(tl.float32)
    out = (out * tl.rsqrt(tl.sum(out * out, 0) / DV + eps) * norm).to(number).to(tl.float32)
    tl.store(out_ptr, (out * silu(z)).to(number), mask=e_ok)


@triton.jit
def _product(vector, matrix, PART: tl.constexpr, WARPS: tl.constexpr):
    """vector @ matrix, of each warp's part: [WARPS, values]"""
    return tl.sum(tl.reshape(vector, [WARPS, PART])[:, :, None] * matrix, 1)


@triton.jit
def _rows_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For many rows. ROWS: of a state, that are read at once; the next are on their way then. PART: tokens of a tail
    that are; TAIL: at least those of a page."""
    head = tl.program_id(0)
    entry = tl.program_id(1)
    if PDL:
        tl_cuda.gdc_launch_dependents()
    row = tl.load(rows_ptr + entry)
    position = tl.load(lens_ptr + entry) - 1
    slot = tl.load(slot_ptr + row)
    border = tl.load(border_ptr + row)
    number: tl.constexpr = out_ptr.dtype.element_ty
    e = tl.arange(0, DV_PADDED)
    e_ok = e < DV
    out_ptr += (entry.to(tl.int64) * HV + head) * DV + e
    if slot == 0:  # it pads the batch
        if PDL:
            tl_cuda.gdc_wait()
        tl.store(out_ptr, tl.zeros([DV_PADDED], number), mask=e_ok)
        return
    r = tl.arange(0, ROWS)
    states_ptr += (slot.to(tl.int64) * HV + head) * (DK * DV) + (r[:, None] * DV + e[None, :])
    even = _state_rows(states_ptr, 0, r, e_ok, DK, DV, ROWS)
    odd = _state_rows(states_ptr, ROWS, r, e_ok, DK, DV, ROWS)
    num_tail = position - border
    C: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = head // (HV // HK)
    row_64 = row.to(tl.int64)
    u_ptr = tail_u_ptr + (row_64 * HV + head) * (LENGTH * DV)
    k_ptr = tail_k_ptr + (row_64 * HK + key_head) * (LENGTH * DK)
    g_ptr = tail_g_ptr + (row_64 * HV + head) * LENGTH
    ring_ptr = tail_conv_ptr + row_64 * (RING * C)
    d = tl.arange(0, DK_PADDED)
    d_ok = d < DK
    j = tl.arange(0, TAIL)
    tail_g = tl.load(g_ptr + (border + j) % LENGTH, mask=j < num_tail, other=0.0)
    norm = tl.load(norm_ptr + e, mask=e_ok, other=0.0).to(tl.float32)
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    token_ptr = x_ptr + entry.to(tl.int64) * x_stride
    if PDL:
        tl_cuda.gdc_wait()
    q, k, v, z, g, beta = _appended(
        token_ptr, ring_ptr, k_ptr, g_ptr, weight_ptr, head, position, a_log, dt_bias, beta_scale, d, e, HK, HV, DK, DV,
        WIDTH, LENGTH, RING,
    )  # fmt: skip
    place = position % LENGTH
    q = q * (q_scale * tl.rsqrt(tl.sum(q * q, 0) + l2_eps))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
    qk = tl.sum(q * k, 0)
    total = tl.sum(tail_g, 0) + g
    rest = total
    seen_k = tl.zeros([DV_PADDED], tl.float32)
    seen_q = tl.zeros([DV_PADDED], tl.float32)
    p = tl.arange(0, PART)
    for first in tl.range(0, num_tail, PART):
        at = (border + first + p) % LENGTH
        ok = first + p < num_tail
        tail_u = tl.load(u_ptr + at[:, None] * DV + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0)
        tail_k = tl.load(k_ptr + at[:, None] * DK + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        part_g = tl.load(g_ptr + at, mask=ok, other=0.0)
        tail_k = tail_k.to(tl.float32)
        weight = tl.rsqrt(tl.sum(tail_k * tail_k, 1) + l2_eps) * tl.exp(rest - tl.cumsum(part_g, 0))
        rest -= tl.sum(part_g, 0)
        seen_k += tl.sum((weight * tl.sum(tail_k * k[None, :], 1))[:, None] * tail_u, 0)
        seen_q += tl.sum((weight * tl.sum(tail_k * q[None, :], 1))[:, None] * tail_u, 0)
    decay = tl.exp(total)
    decay_k = decay * k
    decay_q = decay * q
    for n in tl.range(0, DK, 2 * ROWS):
        seen_k += tl.sum(tl.gather(decay_k, n + r, 0)[:, None] * even, 0)
        seen_q += tl.sum(tl.gather(decay_q, n + r, 0)[:, None] * even, 0)
        even = _state_rows(states_ptr, n + 2 * ROWS, r, e_ok, DK, DV, ROWS)
        seen_k += tl.sum(tl.gather(decay_k, n + ROWS + r, 0)[:, None] * odd, 0)
        seen_q += tl.sum(tl.gather(decay_q, n + ROWS + r, 0)[:, None] * odd, 0)
        odd = _state_rows(states_ptr, n + 3 * ROWS, r, e_ok, DK, DV, ROWS)
    u = beta * (v - seen_k)
    tl.store(u_ptr + place * DV + e, u, mask=e_ok)
    out = (seen_q + qk * u).to(number).to(tl.float32)
    out = (out * tl.rsqrt(tl.sum(out * out, 0) / DV + eps) * norm).to(number).to(tl.float32)
    tl.store(out_ptr, (out * silu(z)).to(number), mask=e_ok)


@triton.jit
def _state_rows(states_ptr, first, r, e_ok, DK: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr):
    """Rows r of a state from `first` on; zeros behind its last."""
    if DK % (2 * ROWS) == 0:
        ok = (e_ok & (first < DK))[None, :]
    else:
        ok = (first + r < DK)[:, None] & e_ok[None, :]
    return tl.load(states_ptr + first * DV, mask=ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def _appended(
    token_ptr, ring_ptr, k_ptr, g_ptr, weight_ptr, head, position, a_log, dt_bias, beta_scale, d, e, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Query, key, value and z of a token's head, logarithm of its decay and its beta. Of these, and of what they are
    convolved from, it appends what tails hold: nothing of its row that its launch reads."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    d_ok = d < DK
    e_ok = e < DV
    q_channel = head // (HV // HK) * DK + d
    k_channel = HK * DK + q_channel
    v_channel = 2 * HK * DK + head * DV + e
    raw_q, q = _convolved(token_ptr, ring_ptr, weight_ptr, q_channel, d, DK, position, C, WIDTH, RING)
    raw_k, k = _convolved(token_ptr, ring_ptr, weight_ptr, k_channel, d, DK, position, C, WIDTH, RING)
    raw_v, v = _convolved(token_ptr, ring_ptr, weight_ptr, v_channel, e, DV, position, C, WIDTH, RING)
    b = tl.load(token_ptr + C + HV * DV + head).to(tl.float32)
    a = tl.load(token_ptr + C + HV * DV + HV + head).to(tl.float32)
    z = tl.load(token_ptr + C + head * DV + e, mask=e_ok, other=0.0).to(tl.float32)
    g = log_decay(a, a_log, dt_bias)
    place = position % LENGTH
    tl.store(g_ptr + place, g)
    place_ptr = ring_ptr + (position % RING) * C
    tl.store(place_ptr + v_channel, raw_v, mask=e_ok)
    if head % (HV // HK) == 0:
        tl.store(k_ptr + place * DK + d, k.to(k_ptr.dtype.element_ty), mask=d_ok)
        tl.store(place_ptr + q_channel, raw_q, mask=d_ok)
        tl.store(place_ptr + k_channel, raw_k, mask=d_ok)
    return q, k, v, z, g, beta_scale / (1.0 + tl.exp(-b))


@triton.jit
def _convolved(
    token_ptr, ring_ptr, weight_ptr, channel, lane, size: tl.constexpr, position, C: tl.constexpr,
    WIDTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Some channels of a token, the first `size` lanes, and silu of their convolution, rounded as the tail holds it, in
    float32."""
    ok = lane < size
    raw = tl.load(token_ptr + channel, mask=ok, other=0.0)
    weight_ptr += (WIDTH - 1) * C + channel
    total = raw.to(tl.float32) * tl.load(weight_ptr, mask=ok, other=0.0).to(tl.float32)
    for back in tl.static_range(1, WIDTH):
        at = position - back
        kept_ok = lane < tl.where(at >= 0, size, 0)
        tap = tl.load(ring_ptr + (at % RING) * C + channel, mask=kept_ok, other=0.0).to(tl.float32)
        total += tap * tl.load(weight_ptr - back * C, mask=ok, other=0.0).to(tl.float32)
    return raw, silu(total).to(token_ptr.dtype.element_ty).to(tl.float32)
