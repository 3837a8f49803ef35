"""`reference.delta_window` and `delta_fold` in the Triton language, bound by the bytes of states.

A program of the window has one row and one value head, whose state it reads once. Where a row has one entry, the state
is streamed through shared memory in tiles of some of its values, several ahead; where it may have drafts, it stays in
registers while all entries of the row go by, one after the other, so that drafts cost no state. Products are float32
FMA on purpose: tensor cores in TF32 would lose three digits, and bytes take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.recurrent.calls import L2_EPS, DeltaLayer, FoldBatch, WindowBatch
from minisgl_backend.kernels.recurrent.parts import log_decay, silu
from minisgl_backend.kernels.shared_memory import stages_that_fit
from minisgl_backend.kv.state import LayerState
from minisgl_backend.kv.state_config import StateConfig

_TAIL = 32  # tokens of a tail that are read at once, beside a state in registers
_LONGEST_TAIL = 128  # tokens of a page whose keys fit registers, beside a tile of a state
_TILE = 32  # values of a tile
_PER_THREAD = 64  # numbers of a state that a thread holds, where a program has all of it


class StreamShape(NamedTuple):
    """How a state is streamed."""

    tile: int  # of its values
    num_warps: int
    num_stages: int  # tiles in flight, and one


def stream_shape(config: StateConfig, page_size: int, shared: int) -> StreamShape:
    """Tiles leave room for four programs on a multiprocessor. The same for any number of rows: it is compiled once."""
    tile, rows = min(_TILE, next_power_of_2(config.v_dim)), next_power_of_2(config.k_dim)
    stages = stages_that_fit(3, 4 * tile * (rows + next_power_of_2(page_size)), shared // 4)
    return StreamShape(tile, max(1, min(4, rows * tile // 1024)), stages)


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
    facts, tail = DeviceFacts.of(x.device), next_power_of_2(layer.page_size)
    k_padded, v_padded = next_power_of_2(config.k_dim), next_power_of_2(config.v_dim)
    grid = (config.num_v_heads, num_entries)
    tensors = (
        x, out, batch.rows, batch.kv_lens, batch.state_slot, batch.state_border, state.states, state.tail_k,
        state.tail_u, state.tail_g, state.tail_conv, layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight,
        layer.norm_eps, layer.beta_scale, config.k_dim**-0.5, L2_EPS, x.stride(0),
    )  # fmt: skip
    sizes = {
        "HK": config.num_k_heads, "HV": config.num_v_heads, "DK": config.k_dim, "DK_PADDED": k_padded,
        "DV": config.v_dim, "WIDTH": config.conv_width, "LENGTH": state.tail_u.shape[2],
        "RING": state.tail_conv.shape[1], **pdl_options(batch.pdl),
    }  # fmt: skip
    if not batch.has_drafts and tail <= _LONGEST_TAIL:
        shape = shape or stream_shape(config, layer.page_size, facts.shared_memory)
        _streaming_kernel[grid](
            *tensors, TILE=shape.tile, TILES=v_padded // shape.tile, TAIL=tail, STAGES=shape.num_stages,
            num_warps=shape.num_warps, **sizes,
        )  # fmt: skip
        return out
    _window_kernel[grid](
        *tensors, num_entries, DV_PADDED=v_padded, PAGE=layer.page_size, TAIL=min(_TAIL, tail),
        ENTRIES=next_power_of_2(1 + layer.max_drafts),
        num_warps=max(1, min(16, k_padded * v_padded // (32 * _PER_THREAD))), **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_entries"])
def _window_kernel(
    x_ptr, out_ptr, rows_ptr, lens_ptr, slot_ptr, border_ptr, states_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr,
    tail_conv_ptr, weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, eps, beta_scale, q_scale, l2_eps, x_stride,
    num_entries, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TAIL: tl.constexpr, LENGTH: tl.constexpr,
    RING: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LENGTH, RING: of the rings of a tail; TAIL: tokens of a tail at once; ENTRIES: at least those that a row has."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    entry = tl.program_id(1)
    row = tl.load(rows_ptr + entry)
    slot = tl.load(slot_ptr + row)
    count = 1
    if ENTRIES > 1:
        # A row's first entry has a program for all of them; each entry that pads the batch has its own.
        before = tl.load(rows_ptr + entry - 1, mask=entry > 0, other=-1)
        if (before == row) & (slot > 0):
            return
        i = tl.arange(0, ENTRIES)
        rows = tl.load(rows_ptr + entry + i, mask=entry + i < num_entries, other=-1)
        count = tl.where(slot > 0, tl.sum((rows == row).to(tl.int32), 0), 1)
    first = tl.load(lens_ptr + entry) - 1  # position of the first entry
    border = tl.load(border_ptr + row)
    num_tail = tl.where(slot > 0, first - border, 0)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = head // (HV // HK)
    writes_keys = head % (HV // HK) == 0
    row_64 = row.to(tl.int64)
    d = tl.arange(0, DK_PADDED)
    e = tl.arange(0, DV_PADDED)
    d_ok = d < DK
    e_ok = e < DV
    j = tl.arange(0, TAIL)
    u_ptr = tail_u_ptr + (row_64 * HV + head) * (LENGTH * DV)
    k_ptr = tail_k_ptr + (row_64 * HK + key_head) * (LENGTH * DK)
    g_ptr = tail_g_ptr + (row_64 * HV + head) * LENGTH
    ring_ptr = tail_conv_ptr + row_64 * (RING * C)
    states_ptr += (slot.to(tl.int64) * HV + head) * (DK * DV)
    some = (d < tl.where(slot > 0, DK, 0))[:, None] & e_ok[None, :]
    state_ptr = states_ptr + d[:, None] * DV + e[None, :]
    state = tl.load(state_ptr, mask=some, other=0.0, eviction_policy="evict_first")
    if PAGE <= TAIL:
        ok = j < num_tail
        at = (border + j) % LENGTH
        tail_u = tl.load(u_ptr + at[:, None] * DV + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0)
        tail_k = tl.load(k_ptr + at[:, None] * DK + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        tail_g = tl.load(g_ptr + at, mask=ok, other=0.0)
        total = tl.sum(tail_g, 0)
    else:
        total = tl.full([], 0.0, tl.float32)
        for start in tl.range(0, num_tail, TAIL):
            at = (border + start + j) % LENGTH
            total += tl.sum(tl.load(g_ptr + at, mask=start + j < num_tail, other=0.0), 0)
    q_channel = key_head * DK + d
    k_channel = HK * DK + q_channel
    v_channel = 2 * HK * DK + head * DV + e
    a_log = tl.load(a_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    norm = tl.load(norm_ptr + e, mask=e_ok, other=0.0).to(tl.float32)
    if ENTRIES > 1:
        own = tl.arange(0, ENTRIES)
        own_k = tl.zeros([ENTRIES, DK_PADDED], tl.float32)
        own_u = tl.zeros([ENTRIES, DV_PADDED], tl.float32)
        own_total = tl.zeros([ENTRIES], tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
    for n in tl.range(0, count):
        position = first + n
        token_ptr = x_ptr + (entry + n).to(tl.int64) * x_stride
        q = _convolved(token_ptr, ring_ptr, weight_ptr, q_channel, d, DK, position, n, x_stride, C, WIDTH, RING)
        k = _convolved(token_ptr, ring_ptr, weight_ptr, k_channel, d, DK, position, n, x_stride, C, WIDTH, RING)
        v = _convolved(token_ptr, ring_ptr, weight_ptr, v_channel, e, DV, position, n, x_stride, C, WIDTH, RING)
        b = tl.load(token_ptr + C + HV * DV + head).to(tl.float32)
        a = tl.load(token_ptr + C + HV * DV + HV + head).to(tl.float32)
        z = tl.load(token_ptr + C + head * DV + e, mask=e_ok, other=0.0).to(tl.float32)
        beta = beta_scale / (1.0 + tl.exp(-b))
        g = log_decay(a, a_log, dt_bias)
        raw_k = k
        q = q * (q_scale * tl.rsqrt(tl.sum(q * q, 0) + l2_eps))
        k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
        total += g
        decay = tl.exp(total)
        seen_k = decay * tl.sum(state * k[:, None], 0)
        seen_q = decay * tl.sum(state * q[:, None], 0)
        # From the border on, `upto` sums the decays: those of the tail, less what lies between a token and this one.
        if PAGE <= TAIL:
            more_k, more_q, _ = _tail_part(tail_k, tail_u, tail_g, k, q, total, 0.0, l2_eps)
            seen_k += more_k
            seen_q += more_q
        else:
            upto = tl.full([], 0.0, tl.float32)
            for start in tl.range(0, num_tail, TAIL):
                ok = start + j < num_tail
                at = (border + start + j) % LENGTH
                part_u = tl.load(u_ptr + at[:, None] * DV + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0)
                part_k = tl.load(k_ptr + at[:, None] * DK + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
                part_g = tl.load(g_ptr + at, mask=ok, other=0.0)
                more_k, more_q, upto = _tail_part(part_k, part_u, part_g, k, q, total, upto, l2_eps)
                seen_k += more_k
                seen_q += more_q
        if ENTRIES > 1:
            weight = tl.where(own < n, tl.exp(total - own_total), 0.0)
            seen_k += tl.sum(own_u * (tl.sum(own_k * k[None, :], 1) * weight)[:, None], 0)
            seen_q += tl.sum(own_u * (tl.sum(own_k * q[None, :], 1) * weight)[:, None], 0)
        u = beta * (v - seen_k)
        o = seen_q + tl.sum(q * k, 0) * u
        if ENTRIES > 1:
            own_k = tl.where((own == n)[:, None], k[None, :], own_k)
            own_u = tl.where((own == n)[:, None], u[None, :], own_u)
            own_total = tl.where(own == n, total, own_total)
        # Appended: nothing of this row that this launch reads.
        place = position % LENGTH
        tl.store(u_ptr + place * DV + e, u, mask=e_ok)
        tl.store(g_ptr + place, g)
        place_ptr = ring_ptr + (position % RING) * C
        tl.store(place_ptr + v_channel, tl.load(token_ptr + v_channel, mask=e_ok, other=0.0), mask=e_ok)
        if writes_keys:
            tl.store(k_ptr + place * DK + d, raw_k.to(tail_k_ptr.dtype.element_ty), mask=d_ok)
            tl.store(place_ptr + q_channel, tl.load(token_ptr + q_channel, mask=d_ok, other=0.0), mask=d_ok)
            tl.store(place_ptr + k_channel, tl.load(token_ptr + k_channel, mask=d_ok, other=0.0), mask=d_ok)
        number: tl.constexpr = out_ptr.dtype.element_ty
        o = o.to(number).to(tl.float32)
        o = (o * tl.rsqrt(tl.sum(o * o, 0) / DV + eps) * norm).to(number).to(tl.float32)
        tl.store(out_ptr + ((entry + n).to(tl.int64) * HV + head) * DV + e, (o * silu(z)).to(number), mask=e_ok)


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
        c_ok = (c < DV)[None, :]
        state = tl.load(
            states_ptr + d[:, None] * DV + c[None, :], mask=(d < d_limit)[:, None] & c_ok, other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        tail_u = tl.load(u_ptr + j_at[:, None] * DV + c[None, :], mask=j_ok[:, None] & c_ok, other=0.0)
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


@triton.jit
def _tail_part(tail_k, tail_u, tail_g, k, q, total, upto, l2_eps):
    """What some tokens of the tail add to S' k and S' q. tail_k [n, k_dim], not normed; tail_u [n, v_dim]; tail_g [n];
    total: sum of the decays up to this token; upto: up to the first of these."""
    tail_k = tail_k.to(tl.float32)
    weight = tl.rsqrt(tl.sum(tail_k * tail_k, 1) + l2_eps) * tl.exp(total - upto - tl.cumsum(tail_g, 0))
    seen_k = tl.sum(tail_u * (tl.sum(tail_k * k[None, :], 1) * weight)[:, None], 0)
    seen_q = tl.sum(tail_u * (tl.sum(tail_k * q[None, :], 1) * weight)[:, None], 0)
    return seen_k, seen_q, upto + tl.sum(tail_g, 0)


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


def delta_fold(stack: LayerState, batch: FoldBatch, page_size: int) -> None:
    """As `reference.delta_fold`."""
    num_layers, _, num_v_heads, k_dim, v_dim = stack.states.shape
    if len(batch.rows) == 0:
        return
    k_padded, v_padded = next_power_of_2(k_dim), next_power_of_2(v_dim)
    _fold_kernel[(num_v_heads, len(batch.rows), num_layers)](
        *batch, *stack, *(tensor.stride(0) for tensor in stack), L2_EPS, HK=stack.tail_k.shape[2], HV=num_v_heads,
        DK=k_dim, DK_PADDED=max(16, k_padded), DV=v_dim, DV_PADDED=max(16, v_padded), WIDTH=stack.conv.shape[2] + 1,
        WIDTH_PADDED=next_power_of_2(stack.conv.shape[2]), LENGTH=stack.tail_u.shape[3], RING=stack.tail_conv.shape[2],
        TAIL=max(16, min(_TAIL, next_power_of_2(page_size))),
        num_warps=max(1, min(8, k_padded * v_padded // (32 * _PER_THREAD))),
    )  # fmt: skip


@triton.jit
def _fold_kernel(
    rows_ptr, sources_ptr, targets_ptr, starts_ptr, borders_ptr, states_ptr, conv_ptr, tail_k_ptr, tail_u_ptr,
    tail_g_ptr, tail_conv_ptr, states_stride, conv_stride, k_stride, u_stride, g_stride, ring_stride, l2_eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    DV_PADDED: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, LENGTH: tl.constexpr,
    RING: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Strides: of a layer."""
    head = tl.program_id(0)
    fold = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + fold).to(tl.int64)
    source = tl.load(sources_ptr + fold).to(tl.int64)
    target = tl.load(targets_ptr + fold).to(tl.int64)
    start = tl.load(starts_ptr + fold)
    border = tl.load(borders_ptr + fold)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = head // (HV // HK)
    d = tl.arange(0, DK_PADDED)
    e = tl.arange(0, DV_PADDED)
    d_ok = d < DK
    e_ok = e < DV
    j = tl.arange(0, TAIL)
    states_ptr += layer * states_stride + head * (DK * DV) + d[:, None] * DV + e[None, :]
    slot_size: tl.constexpr = HV * DK * DV
    state_ok = d_ok[:, None] & e_ok[None, :]
    some = (d < tl.where(source > 0, DK, 0))[:, None] & e_ok[None, :]
    state = tl.load(states_ptr + source * slot_size, mask=some, other=0.0)
    tail_k_ptr += layer * k_stride + (row * HK + key_head) * (LENGTH * DK)
    tail_u_ptr += layer * u_stride + (row * HV + head) * (LENGTH * DV)
    tail_g_ptr += layer * g_stride + (row * HV + head) * LENGTH
    for first in tl.range(start, border, TAIL):
        ok = first + j < border
        at = (first + j) % LENGTH
        u = tl.load(tail_u_ptr + at[:, None] * DV + e[None, :], mask=ok[:, None] & e_ok[None, :], other=0.0)
        k = tl.load(tail_k_ptr + at[:, None] * DK + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)
        g = tl.load(tail_g_ptr + at, mask=ok, other=0.0)
        k = k.to(tl.float32)
        total = tl.sum(g, 0)
        weight = tl.rsqrt(tl.sum(k * k, 1) + l2_eps) * tl.exp(total - tl.cumsum(g, 0))
        state = tl.dot(tl.trans(k * weight[:, None]), u, state * tl.exp(total), input_precision="ieee")
    tl.store(states_ptr + target * slot_size, state, mask=state_ok)
    # Raw inputs before the border.
    i = tl.arange(0, WIDTH_PADDED)
    seen = border - (WIDTH - 1) + i
    ring_ptr = tail_conv_ptr + layer * ring_stride + row * (RING * C) + ((seen + RING) % RING)[:, None] * C
    kept_ptr = conv_ptr + layer * conv_stride + target * ((WIDTH - 1) * C) + i[:, None] * C
    i_ok = (i < WIDTH - 1)[:, None]
    seen_ok = (seen >= 0)[:, None]
    v_channel = (2 * HK * DK + head * DV + e)[None, :]
    raw = tl.load(ring_ptr + v_channel, mask=i_ok & seen_ok & e_ok[None, :], other=0.0)
    tl.store(kept_ptr + v_channel, raw, mask=i_ok & e_ok[None, :])
    if head % (HV // HK) == 0:
        for part in tl.static_range(2):  # queries, then keys
            channel = (part * HK * DK + key_head * DK + d)[None, :]
            raw = tl.load(ring_ptr + channel, mask=i_ok & seen_ok & d_ok[None, :], other=0.0)
            tl.store(kept_ptr + channel, raw, mask=i_ok & d_ok[None, :])
