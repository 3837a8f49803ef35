"""`reference.delta_chunk` in the Triton language: two launches a layer.

The first has a program for each block of tokens and value head, all at once: it solves the block's triangular system.
With K and Q the block's keys and queries as the convolution left them, rk and rq what norms them, G the sums of decays,

    u = T (v - e^G rk K S),   T = (I + A)^-1 diag(beta),   A = strictly lower(beta rk rk' K K' e^(G_i - G_j))
    o = e^G rq Q S + P u,     P = lower(rq rk' Q K' e^(G_i - G_j))
    S <- e^(G_last) S + K' (e^(G_last - G) rk u)

so T, P and the vectors before K and Q are all that the second needs: it has a program for each sequence, value head and
some of the values, and goes through the blocks in order with its part of S in registers, as float32.

Keys, queries and values are exact in products. States, u and T are split into two 16-bit numbers, so that their error
is 2^-16, where it stays in the states; outputs, which are rounded anyway, take the upper one alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl_backend.kernels.launch import cdiv, next_power_of_2
from minisgl_backend.kernels.recurrent.calls import BLOCK, L2_EPS, Block, ChunkBatch, ChunkRow, DeltaLayer
from minisgl_backend.kernels.recurrent.parts import dot_with_pair, halves, log_decay, pair_dot
from minisgl_backend.kernels.shared_memory import shared_memory

_BLOCK_COLUMNS = len(Block._fields)
_ROW_COLUMNS = len(ChunkRow._fields)


class ChunkShape(NamedTuple):
    """How the second launch is cut."""

    tile: int  # of a head's values
    num_warps: int
    num_stages: int  # 1: a block is read when its turn comes; 3: when the one before it ends; 5: one earlier


# From the best on: the shared memory that each takes, with keys of 128 numbers of 16 bits.
_SHAPES = ((ChunkShape(32, 4, 5), 204 << 10), (ChunkShape(32, 4, 1), 80 << 10))


def chunk_shape(k_dim: int, v_dim: int, shared: int, number_bytes: int) -> ChunkShape:
    """The best that fits. The same for any number of sequences: it is compiled once."""
    times = max(1, next_power_of_2(k_dim) // 128) * number_bytes // 2
    shape = next((shape for shape, needed in _SHAPES if needed * times <= shared), ChunkShape(16, 4, 1))
    return shape._replace(tile=max(16, min(shape.tile, next_power_of_2(v_dim))))


def delta_chunk(
    mixed: torch.Tensor, x: torch.Tensor, layer: DeltaLayer, batch: ChunkBatch, shape: ChunkShape | None = None
) -> torch.Tensor:
    """As `reference.delta_chunk`; rows of x may be strided. shape: another than the chosen one."""
    config, state = layer.config, layer.state
    num_blocks, num_sequences = len(batch.blocks), len(batch.sequences)
    heads, exact = config.num_v_heads, mixed.dtype == torch.float32
    out = mixed.new_empty((len(mixed), heads * config.v_dim))
    if num_blocks == 0:
        return out
    parts = 1 if exact else 2
    solved = mixed.new_empty((parts, num_blocks, heads, BLOCK, BLOCK))
    scores = mixed.new_empty((num_blocks, heads, BLOCK, BLOCK))
    vectors = torch.empty((4, num_blocks, heads, BLOCK), dtype=torch.float32, device=x.device)
    decays = torch.empty((num_blocks, heads), dtype=torch.float32, device=x.device)
    k_padded = max(16, next_power_of_2(config.k_dim))
    sizes = {"HK": config.num_k_heads, "HV": heads, "DK": config.k_dim, "DK_PADDED": k_padded, "DV": config.v_dim}
    _solve_kernel[(heads, num_blocks)](
        mixed, x, batch.blocks, layer.a_log, layer.dt_bias, solved, scores, vectors, decays, layer.beta_scale,
        config.k_dim**-0.5, L2_EPS, x.stride(0), num_blocks, BLOCK=BLOCK, COLUMNS=_BLOCK_COLUMNS, EXACT=exact,
        num_warps=4, **sizes,
    )  # fmt: skip
    if shape is None:
        shape = chunk_shape(config.k_dim, config.v_dim, shared_memory(x.device), mixed.element_size())
    _states_kernel[(cdiv(config.v_dim, shape.tile), heads, num_sequences)](
        mixed, x, out, batch.blocks, batch.sequences, solved, scores, vectors, decays, *state, x.stride(0), num_blocks,
        TILE=shape.tile, WIDTH=config.conv_width, WIDTH_PADDED=next_power_of_2(config.conv_width - 1),
        LENGTH=state.tail_u.shape[2], RING=state.tail_conv.shape[1], BLOCK=BLOCK, COLUMNS=_BLOCK_COLUMNS,
        ROW_COLUMNS=_ROW_COLUMNS, EXACT=exact, STAGES=shape.num_stages, num_warps=shape.num_warps, **sizes,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _solve_kernel(
    mixed_ptr, x_ptr, blocks_ptr, a_log_ptr, dt_bias_ptr, solved_ptr, scores_ptr, vectors_ptr, decays_ptr, beta_scale,
    q_scale, l2_eps, x_stride, num_blocks, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DK_PADDED: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    block = tl.program_id(1)
    token = tl.load(blocks_ptr + block * COLUMNS + 1).to(tl.int64)
    length = tl.load(blocks_ptr + block * COLUMNS + 2)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    key_head = head // (HV // HK)
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, DK_PADDED)
    i_ok = i < length
    ok = i_ok[:, None] & (d < DK)[None, :]
    q_ptr = mixed_ptr + (token + i)[:, None] * C + key_head * DK + d[None, :]
    q = tl.load(q_ptr, mask=ok, other=0.0)
    k = tl.load(q_ptr + HK * DK, mask=ok, other=0.0)
    gates_ptr = x_ptr + (token + i) * x_stride + C + HV * DV + head
    b = tl.load(gates_ptr, mask=i_ok, other=0.0).to(tl.float32)
    a = tl.load(gates_ptr + HV, mask=i_ok, other=0.0).to(tl.float32)
    beta = beta_scale / (1.0 + tl.exp(-b))
    g = tl.where(i_ok, log_decay(a, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)), 0.0)
    total = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    rq = q_scale * tl.rsqrt(tl.sum(wide_q * wide_q, 1) + l2_eps)
    rk = tl.rsqrt(tl.sum(wide_k * wide_k, 1) + l2_eps)
    seen = i[:, None] >= i[None, :]
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], -float("inf"))) * rk[None, :]
    precision: tl.constexpr = "tf32x3" if EXACT else "tf32"
    score = tl.dot(q, tl.trans(k), input_precision=precision) * decay * rq[:, None]
    place = (block * HV + head).to(tl.int64)
    square = place * (BLOCK * BLOCK) + i[:, None] * BLOCK + i[None, :]
    number: tl.constexpr = solved_ptr.dtype.element_ty
    tl.store(scores_ptr + square, score.to(number))
    system = tl.dot(k, tl.trans(k), input_precision=precision) * decay * (beta * rk)[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    solved = _inverse(system, i, number) * beta[None, :]
    if EXACT:
        tl.store(solved_ptr + square, solved)
    else:
        high, low = halves(solved, number)
        tl.store(solved_ptr + square, high)
        tl.store(solved_ptr + num_blocks.to(tl.int64) * (HV * BLOCK * BLOCK) + square, low)
    vector = vectors_ptr + place * BLOCK + i
    size = num_blocks.to(tl.int64) * (HV * BLOCK)
    grown = tl.exp(total)
    tl.store(vector, grown * rk)
    tl.store(vector + size, grown * rq)
    tl.store(vector + 2 * size, tl.exp(last - total) * rk)
    tl.store(vector + 3 * size, g)
    tl.store(decays_ptr + place, tl.exp(last))


@triton.jit
def _inverse(system, i, number: tl.constexpr):
    """(I + system)^-1 of a strictly lower matrix: of blocks of 4 on the diagonal, then of 16, then of all 64.

    A power of `system` may be huge where its inverse is not (as where keys are alike), so no more than cubes are taken:
    of a matrix of 4 by 4 blocks, strictly lower as blocks, the fourth is zero.
    """
    size: tl.constexpr = system.shape[0]
    count: tl.constexpr = size // 16
    # Of blocks of 16 on the diagonal at once, [count, 16, 16], which takes a count-th of the products.
    b = tl.arange(0, count)
    on_diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, tl.reshape(system, [count, 16, count, 16]), 0.0), 2)
    j = tl.arange(0, 16)
    row, column = j[None, :, None], j[None, None, :]
    is_inner = row // 4 == column // 4
    inner = tl.where(is_inner, blocks, 0.0)
    square = pair_dot(inner, inner, number)
    inverse = tl.where(row == column, 1.0, 0.0) - inner + square - pair_dot(inner, square, number)
    inverse = _widen(inverse, tl.where(is_inner, 0.0, blocks), number)
    inverse = tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [size, size])
    outer = tl.where(i[:, None] // 16 != i[None, :] // 16, system, 0.0)
    return _widen(inverse, outer, number)


@triton.jit
def _widen(inverse, outer, number: tl.constexpr):
    """(D + outer)^-1 of D's inverse = (1 - N + N^2 - N^3) D^-1, with N = D^-1 outer."""
    n = pair_dot(inverse, outer, number)
    squared = pair_dot(n, inverse, number)  # N D^-1
    cubed = pair_dot(n, squared, number)  # N^2 D^-1
    return inverse - squared + cubed - pair_dot(n, cubed, number)


@triton.jit(do_not_specialize=["num_blocks"])
def _states_kernel(
    mixed_ptr, x_ptr, out_ptr, blocks_ptr, rows_ptr, solved_ptr, scores_ptr, vectors_ptr, decays_ptr, states_ptr,
    conv_ptr, tail_k_ptr, tail_u_ptr, tail_g_ptr, tail_conv_ptr, x_stride, num_blocks,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DK_PADDED: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, LENGTH: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, ROW_COLUMNS: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    rows_ptr += tl.program_id(2) * ROW_COLUMNS
    row = tl.load(rows_ptr).to(tl.int64)
    first_token = tl.load(rows_ptr + 1).to(tl.int64)
    chunk_length = tl.load(rows_ptr + 2)
    chunk_position = tl.load(rows_ptr + 3)
    source = tl.load(rows_ptr + 4)
    target = tl.load(rows_ptr + 5).to(tl.int64)
    first_block = tl.load(rows_ptr + 6)
    count = tl.load(rows_ptr + 7)
    num_body = tl.load(rows_ptr + 8)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    SLOT: tl.constexpr = HV * DK * DV
    key_head = head // (HV // HK)
    has_keys = (head % (HV // HK) == 0) & (tile == 0)  # hands over what value heads share
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, DK_PADDED)
    e = tile * TILE + tl.arange(0, TILE)
    d_ok = d < DK
    e_ok = e < DV
    states_ptr += head * (DK * DV) + d[:, None] * DV + e[None, :]
    state_ok = d_ok[:, None] & e_ok[None, :]
    some = (d < tl.where(source > 0, DK, 0))[:, None] & e_ok[None, :]
    state = tl.load(states_ptr + source.to(tl.int64) * SLOT, mask=some, other=0.0).to(tl.float32)
    if num_body == 0:
        tl.store(states_ptr + target * SLOT, state, mask=state_ok)
    size = num_blocks.to(tl.int64) * HV
    # Of a block, before the loop: numbers of 32 bits, and not of 64.
    q_at = (i * C)[:, None] + (key_head * DK + d)[None, :]
    v_at = (i * C)[:, None] + (2 * HK * DK + head * DV + e)[None, :]
    o_at = (i * (HV * DV))[:, None] + (head * DV + e)[None, :]
    square = i[:, None] * BLOCK + i[None, :]
    for n in tl.range(0, count, num_stages=STAGES):
        block = first_block + n
        token = tl.load(blocks_ptr + block * COLUMNS + 1).to(tl.int64)
        length = tl.load(blocks_ptr + block * COLUMNS + 2)
        place = (block * HV + head).to(tl.int64)
        i_ok = i < length
        qk_ok = i_ok[:, None] & d_ok[None, :]
        block_ptr = mixed_ptr + token * C
        q = tl.load(block_ptr + q_at, mask=qk_ok, other=0.0)
        k = tl.load(block_ptr + HK * DK + q_at, mask=qk_ok, other=0.0)
        v_ok = i_ok[:, None] & e_ok[None, :]
        v = tl.load(block_ptr + v_at, mask=v_ok, other=0.0)
        squares = place * (BLOCK * BLOCK)
        score = tl.load(scores_ptr + squares + square)
        solved = tl.load(solved_ptr + squares + square)
        vector_ptr = vectors_ptr + place * BLOCK
        before_k = tl.load(vector_ptr + i)
        before_q = tl.load(vector_ptr + size * BLOCK + i)
        after = tl.load(vector_ptr + size * (2 * BLOCK) + i)
        decay = tl.load(decays_ptr + place)
        rest = v.to(tl.float32) - before_k[:, None] * dot_with_pair(k, state)
        if EXACT:
            u = tl.dot(solved, rest, input_precision="tf32x3")
            o = before_q[:, None] * tl.dot(q, state, input_precision="tf32x3")
            o = tl.dot(score, u, o, input_precision="tf32x3")
        else:
            lower = tl.load(solved_ptr + (size * (BLOCK * BLOCK) + squares) + square)
            high, low = halves(rest, q.dtype)
            u = tl.dot(solved, high, tl.dot(solved, low, tl.dot(lower, high)))
            o = before_q[:, None] * tl.dot(q, state.to(q.dtype))
            o = tl.dot(score, u.to(q.dtype), o)
        grown = dot_with_pair(tl.trans(k), after[:, None] * u)
        state = state * decay + grown
        tl.store(out_ptr + token * (HV * DV) + o_at, o.to(out_ptr.dtype.element_ty), mask=v_ok)
        if n + 1 == num_body:
            tl.store(states_ptr + target * SLOT, state, mask=state_ok)
        checkpoint = tl.load(blocks_ptr + block * COLUMNS + 5).to(tl.int64)
        if checkpoint > 0:
            tl.store(states_ptr + checkpoint * SLOT, state, mask=state_ok)
        if n >= num_body:
            at = (tl.load(blocks_ptr + block * COLUMNS + 3) + i) % LENGTH
            tail_at = (row * HV + head) * LENGTH + at
            tl.store(tail_u_ptr + tail_at[:, None] * DV + e[None, :], u, mask=v_ok)
            if tile == 0:
                tl.store(tail_g_ptr + tail_at, tl.load(vector_ptr + size * (3 * BLOCK) + i), mask=i_ok)
            if has_keys:
                key_at = (row * HK + key_head) * LENGTH + at
                # Read again: it would take registers in every block.
                key = tl.load(block_ptr + HK * DK + q_at, mask=qk_ok, other=0.0)
                tl.store(tail_k_ptr + key_at[:, None] * DK + d[None, :], key, mask=qk_ok)
    # The last raw inputs: to checkpoints, to the tail, and last to the target, which may be the source.
    raw_ptr = x_ptr + first_token * x_stride
    kept_ptr = conv_ptr + source.to(tl.int64) * ((WIDTH - 1) * C)
    border = chunk_length
    for n in tl.range(0, count):
        block = first_block + n
        ends = (tl.load(blocks_ptr + block * COLUMNS + 1) - first_token).to(tl.int32)
        if n == num_body:
            border = ends
        ends += tl.load(blocks_ptr + block * COLUMNS + 2)
        checkpoint = tl.load(blocks_ptr + block * COLUMNS + 5).to(tl.int64)
        if checkpoint > 0:
            slot_ptr = conv_ptr + checkpoint * ((WIDTH - 1) * C)
            _keep_raw(
                raw_ptr, kept_ptr, slot_ptr, ends, 0, source, head, key_head, has_keys, d, e, x_stride, HK, DK, DV, C,
                WIDTH, WIDTH_PADDED, WIDTH,
            )  # fmt: skip
    ring_ptr = tail_conv_ptr + row * (RING * C)
    place = chunk_position + chunk_length - (WIDTH - 1) + RING
    _keep_raw(
        raw_ptr, kept_ptr, ring_ptr, chunk_length, place, source, head, key_head, has_keys, d, e, x_stride, HK, DK, DV,
        C, WIDTH, WIDTH_PADDED, RING,
    )  # fmt: skip
    slot_ptr = conv_ptr + target * ((WIDTH - 1) * C)
    _keep_raw(
        raw_ptr, kept_ptr, slot_ptr, border, 0, source, head, key_head, has_keys, d, e, x_stride, HK, DK, DV, C, WIDTH,
        WIDTH_PADDED, WIDTH,
    )  # fmt: skip


@triton.jit
def _keep_raw(
    raw_ptr, kept_ptr, to_ptr, length, place, source, head, key_head, has_keys, d, e, x_stride, HK: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr,
    MODULUS: tl.constexpr,
):  # fmt: skip
    """Copies the last raw inputs of a chunk's first `length` tokens, of a program's channels. kept_ptr: those before
    the chunk; place: of the first of them, modulo MODULUS."""
    v_channel = 2 * HK * DK + head * DV + e
    v = _last_raw(raw_ptr, kept_ptr, v_channel, e < DV, length, source, x_stride, C, WIDTH, WIDTH_PADDED)
    q_channel = key_head * DK + d
    keys_ok = d < tl.where(has_keys, DK, 0)
    q = _last_raw(raw_ptr, kept_ptr, q_channel, keys_ok, length, source, x_stride, C, WIDTH, WIDTH_PADDED)
    k = _last_raw(raw_ptr, kept_ptr, q_channel + HK * DK, keys_ok, length, source, x_stride, C, WIDTH, WIDTH_PADDED)
    tl.debug_barrier()  # all is read before any of it is written: it may be the same memory
    j = tl.arange(0, WIDTH_PADDED)
    at = ((place + j) % MODULUS)[:, None] * C
    j_ok = (j < WIDTH - 1)[:, None]
    tl.store(to_ptr + at + v_channel[None, :], v, mask=j_ok & (e < DV)[None, :])
    tl.store(to_ptr + at + q_channel[None, :], q, mask=j_ok & keys_ok[None, :])
    tl.store(to_ptr + at + HK * DK + q_channel[None, :], k, mask=j_ok & keys_ok[None, :])


@triton.jit
def _last_raw(
    raw_ptr, kept_ptr, channel, ok, length, source, x_stride, C: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, WIDTH_PADDED)
    at = length - (WIDTH - 1) + j
    j_ok = j < WIDTH - 1
    new_ok = (j_ok & (at >= 0))[:, None] & ok[None, :]
    new = tl.load(raw_ptr + at[:, None] * x_stride + channel[None, :], mask=new_ok, other=0.0)
    # Before the chunk: zeros where it has no source.
    old_ok = (j < tl.where(source > 0, WIDTH - 1, 0)) & (at < 0)
    old_at = (WIDTH - 1 + at)[:, None] * C + channel[None, :]
    old = tl.load(kept_ptr + old_at, mask=old_ok[:, None] & ok[None, :], other=0.0)
    return tl.where((at >= 0)[:, None], new, old)
