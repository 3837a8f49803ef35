"""Elementwise chains between GEMMs, one kernel each, in the Triton language.

`torch_ops` holds the same functions in plain torch; tests compare them. `pdl`: programmatic dependent launch (Hopper
and later), whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kv.layout import LayerKV


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [num_tokens, hidden] -> x / rms(x) * weight, same shape and dtype; statistics in float32. out: may be x."""
    num_tokens, hidden = x.shape
    out = torch.empty_like(x) if out is None else out
    padded = next_power_of_2(hidden)
    _rms_norm_kernel[(num_tokens,)](
        x, weight, out, x.stride(0), out.stride(0), eps,
        HIDDEN=hidden, PADDED=padded, num_warps=8 if padded >= 4096 else 4, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    out_stride,
    eps,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    ok = i < HIDDEN
    weight = tl.load(weight_ptr + i, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    tl.store(out_ptr + token * out_stride + i, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=ok)


def add_norm(
    hidden: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, multiplier: float, pdl: bool = False
) -> torch.Tensor:
    """hidden + multiplier * rms_norm(x), all [num_tokens, size], written over hidden."""
    num_tokens, size = x.shape
    padded = next_power_of_2(size)
    _add_norm_kernel[(num_tokens,)](
        hidden, x, weight, hidden.stride(0), x.stride(0), eps,
        SIZE=size, PADDED=padded, MULTIPLIER=multiplier, num_warps=8 if padded >= 4096 else 4, **pdl_options(pdl),
    )  # fmt: skip
    return hidden


@triton.jit
def _add_norm_kernel(
    hidden_ptr, x_ptr, weight_ptr, out_stride, x_stride, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, MULTIPLIER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    ok = i < SIZE
    weight = tl.load(weight_ptr + i, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    row = hidden_ptr + token * out_stride + i
    hidden = tl.load(row, mask=ok, other=0.0).to(tl.float32)
    scale = MULTIPLIER / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    tl.store(row, (hidden + x * scale * weight).to(hidden_ptr.dtype.element_ty), mask=ok)


def gate(x: torch.Tensor, gates: torch.Tensor, pdl: bool = False) -> torch.Tensor:
    """x * sigmoid(gates), [num_tokens, size] each, written over x."""
    num_tokens, size = x.shape
    tile = 1024
    _gate_kernel[(num_tokens, cdiv(size, tile))](
        x, gates, x.stride(0), gates.stride(0), size, TILE=tile, num_warps=4, **pdl_options(pdl)
    )
    return x


@triton.jit
def _gate_kernel(x_ptr, gates_ptr, x_stride, gates_stride, size, TILE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x_ptr += token * x_stride + i
    gates = tl.load(gates_ptr + token * gates_stride + i, mask=i < size, other=0.0).to(tl.float32)
    x = tl.load(x_ptr, mask=i < size, other=0.0).to(tl.float32)
    tl.store(x_ptr, (x / (1.0 + tl.exp(-gates))).to(x_ptr.dtype.element_ty), mask=i < size)


def activate_mul(gate_up: torch.Tensor, activation: str = "silu", pdl: bool = False) -> torch.Tensor:
    """gate_up [num_tokens, 2 * size] -> activation(first half) * second half, [num_tokens, size]."""
    num_tokens, width = gate_up.shape
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    tile = 1024
    _activate_mul_kernel[(num_tokens, cdiv(size, tile))](
        gate_up, out, gate_up.stride(0), size, TILE=tile, ACTIVATION=activation, num_warps=4, **pdl_options(pdl)
    )
    return out


@triton.jit
def _activate_mul_kernel(
    gate_up_ptr, out_ptr, stride, size, TILE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = i < size
    gate = tl.load(gate_up_ptr + token * stride + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * stride + size + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + i, gate_mul(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=ok)


def combine(
    result: torch.Tensor,
    k: int,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
    *,
    place: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums each token's k expert outputs and its residual: result [num_tokens * k, size] -> [num_tokens, size].

    place int32 [num_tokens * k]: the row of `result` of each (token, expert) pair, where rows are not in that order;
    weights float32 [num_tokens * k] then scale the rows.
    """
    pairs, size = result.shape
    num_tokens = pairs // k
    out = torch.empty((num_tokens, size), dtype=result.dtype, device=result.device)
    tile = 1024 if place is None else 2048  # whole rows where they are scattered
    if num_tokens > 0:
        _combine_kernel[(num_tokens, cdiv(size, tile))](
            result, result if place is None else place, result if weights is None else weights,
            result if residual is None else residual, out, K=k, SIZE=size, TILE=tile, PLACED=place is not None,
            RESIDUAL=residual is not None, num_warps=4, **pdl_options(pdl),
        )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    result_ptr, place_ptr, weight_ptr, residual_ptr, out_ptr, K: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
    PLACED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ok = i < SIZE
    acc = tl.zeros([TILE], tl.float32)
    for choice in tl.static_range(K):
        line = token * K + choice
        if PLACED:
            weight = tl.load(weight_ptr + line)
            line = tl.load(place_ptr + line).to(tl.int64)
            acc += tl.load(result_ptr + line * SIZE + i, mask=ok, other=0.0).to(tl.float32) * weight
        else:
            acc += tl.load(result_ptr + line * SIZE + i, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual_ptr + token * SIZE + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * SIZE + i, acc.to(out_ptr.dtype.element_ty), mask=ok)


def rope_store(
    qkv: torch.Tensor, rotation: QKNormRope, at: TokenPlaces, kv: LayerKV, num_q_heads: int, pdl: bool = False
) -> torch.Tensor:
    """See `Ops.rope_store`: the q part of qkv is overwritten, and a view of it is returned."""
    num_tokens, k = qkv.shape[0], kv.k
    _, num_kv_heads, page_size, head_dim = k.shape
    half, q_norm, k_norm = head_dim // 2, rotation.q_norm, rotation.k_norm
    if num_tokens > 0:
        # Few tokens: one head per program, for parallelism. Many: several, since one head is too little work.
        # A warp for each program was measured best for both, for 33 to some hundreds of tokens it was not tried.
        tile = 1 if num_tokens <= 32 else 8
        _rope_store_kernel[(num_tokens, cdiv(num_q_heads + 2 * num_kv_heads, tile))](
            qkv, q_norm if q_norm is not None else qkv, k_norm if k_norm is not None else qkv,
            rotation.cos_sin, at.positions, at.slots, k, kv.v, qkv.stride(0), k.stride(0), k.stride(1), k.stride(2),
            rotation.eps, 1.0 / kv.scales.k, 1.0 / kv.scales.v,
            NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, HALF_PADDED=next_power_of_2(half),
            HEADS=tile, PAGE_SIZE=page_size, NORM=q_norm is not None, LARGEST=largest_number(k.dtype),
            num_warps=4 if 32 < num_tokens < 1024 else 1, **pdl_options(pdl),
        )  # fmt: skip
    return qkv[:, : num_q_heads * head_dim].view(num_tokens, num_q_heads, head_dim)


@triton.jit
def _rope_store_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr,
    qkv_stride, kv_stride_page, kv_stride_head, kv_stride_token, eps, k_inverse, v_inverse,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF_PADDED)
    i_ok = i[None, :] < HALF
    ok = (head[:, None] < NUM_Q_HEADS + 2 * NUM_KV_HEADS) & i_ok
    is_q = head[:, None] < NUM_Q_HEADS
    is_k = (head[:, None] >= NUM_Q_HEADS) & (head[:, None] < NUM_Q_HEADS + NUM_KV_HEADS)
    is_v = head[:, None] >= NUM_Q_HEADS + NUM_KV_HEADS
    source = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + i[None, :]
    first_raw = tl.load(source, mask=ok, other=0.0)
    second_raw = tl.load(source + HALF, mask=ok, other=0.0)
    first = first_raw.to(tl.float32)
    second = second_raw.to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        scale = 1.0 / tl.sqrt(mean + eps)[:, None]
        weight = tl.load(q_norm_ptr + i[None, :], mask=is_q & i_ok, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + i[None, :], mask=is_k & i_ok, other=0.0).to(tl.float32)
        first = first * scale * weight
        weight = tl.load(q_norm_ptr + HALF + i[None, :], mask=is_q & i_ok, other=0.0).to(tl.float32)
        weight += tl.load(k_norm_ptr + HALF + i[None, :], mask=is_k & i_ok, other=0.0).to(tl.float32)
        second = second * scale * weight
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + i, mask=i < HALF, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + i, mask=i < HALF, other=0.0)[None, :]
    rotated_first = (first * cos - second * sin).to(qkv_ptr.dtype.element_ty)
    rotated_second = (second * cos + first * sin).to(qkv_ptr.dtype.element_ty)
    tl.store(source, rotated_first, mask=ok & is_q)
    tl.store(source + HALF, rotated_second, mask=ok & is_q)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cache = (slot // PAGE_SIZE) * kv_stride_page + (slot % PAGE_SIZE) * kv_stride_token + i[None, :]
    k_target = k_ptr + cache + (head[:, None] - NUM_Q_HEADS) * kv_stride_head
    cached: tl.constexpr = k_ptr.dtype.element_ty
    tl.store(k_target, to_cache(rotated_first, k_inverse, cached, LARGEST), mask=ok & is_k)
    tl.store(k_target + HALF, to_cache(rotated_second, k_inverse, cached, LARGEST), mask=ok & is_k)
    v_target = v_ptr + cache + (head[:, None] - NUM_Q_HEADS - NUM_KV_HEADS) * kv_stride_head
    tl.store(v_target, to_cache(first_raw, v_inverse, cached, LARGEST), mask=ok & is_v)
    tl.store(v_target + HALF, to_cache(second_raw, v_inverse, cached, LARGEST), mask=ok & is_v)


@triton.jit
def to_cache(x, inverse, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """x times `inverse` (1 / scale of the cache), in the cache's number format; too large values saturate."""
    if x.dtype == dtype:
        return x
    else:
        scaled = x.to(tl.float32) * inverse
        return tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


def largest_number(dtype: torch.dtype) -> float:
    """Beyond which `to_cache` saturates."""
    return torch.finfo(dtype).max
