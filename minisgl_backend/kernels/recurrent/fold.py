"""`reference.delta_fold` in the Triton language, bound by the bytes of states."""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.recurrent.calls import L2_EPS, FoldBatch
from minisgl_backend.kernels.recurrent.parts import dot_with_pair
from minisgl_backend.kv.state import LayerState

_TAIL = 32  # tokens of a tail that are read at once
TILE = 64  # values of a program: several programs fit a multiprocessor


def delta_fold(stack: LayerState, batch: FoldBatch, page_size: int) -> None:
    """As `reference.delta_fold`."""
    num_layers, _, num_v_heads, k_dim, v_dim = stack.states.shape
    if len(batch.rows) == 0:
        return
    k_padded, tile = max(16, next_power_of_2(k_dim)), max(16, min(TILE, next_power_of_2(v_dim)))
    _fold_kernel[(cdiv(v_dim, tile) * num_v_heads, len(batch.rows), num_layers)](
        *batch, *stack, *(tensor.stride(0) for tensor in stack), L2_EPS, HK=stack.tail_k.shape[2], HV=num_v_heads,
        DK=k_dim, DK_PADDED=k_padded, DV=v_dim, TILE=tile, TILES=cdiv(v_dim, tile), WIDTH=stack.conv.shape[2] + 1,
        WIDTH_PADDED=next_power_of_2(stack.conv.shape[2]), LENGTH=stack.tail_u.shape[3], RING=stack.tail_conv.shape[2],
        TAIL=max(16, min(_TAIL, next_power_of_2(page_size))),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _fold_kernel(
    rows_ptr, sources_ptr, targets_ptr, border_ptr, borders_ptr, states_ptr, conv_ptr, tail_k_ptr, tail_u_ptr,
    tail_g_ptr, tail_conv_ptr, states_stride, conv_stride, k_stride, u_stride, g_stride, ring_stride, l2_eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, LENGTH: tl.constexpr,
    RING: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Strides: of a layer."""
    head = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    fold = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + fold).to(tl.int64)
    source = tl.load(sources_ptr + fold).to(tl.int64)
    target = tl.load(targets_ptr + fold).to(tl.int64)
    start = tl.load(border_ptr + row)
    border = tl.load(borders_ptr + fold)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = head // (HV // HK)
    d = tl.arange(0, DK_PADDED)
    e = tile * TILE + tl.arange(0, TILE)
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
        wide_k = k.to(tl.float32)
        total = tl.sum(g, 0)
        weight = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + l2_eps) * tl.exp(total - tl.cumsum(g, 0))
        state = state * tl.exp(total) + dot_with_pair(tl.trans(k), u * weight[:, None])
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
    if (head % (HV // HK) == 0) & (tile == 0):
        for part in tl.static_range(2):  # queries, then keys
            channel = (part * HK * DK + key_head * DK + d)[None, :]
            raw_key = tl.load(ring_ptr + channel, mask=i_ok & seen_ok & d_ok[None, :], other=0.0)
            tl.store(kept_ptr + channel, raw_key, mask=i_ok & d_ok[None, :])
