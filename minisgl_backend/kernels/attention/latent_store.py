"""`Ops.latent_store` (MLA) in one kernel: norm, rotation and store of a token's latent and rotated queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.elementwise import largest_number, to_cache
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.ops import LatentNormRope, TokenPlaces
from minisgl_backend.kv.layout import FP8, LayerKV

_HEADS = 8  # query heads of a program


def latent_store(
    q: torch.Tensor, latents: torch.Tensor, rotation: LatentNormRope, at: TokenPlaces, kv: LayerKV, pdl: bool = False
) -> torch.Tensor:
    """As `Ops.latent_store`."""
    num_tokens, num_heads, qk_dim = q.shape
    norm, cache = rotation.norm, kv.k
    rank, rope = len(norm), latents.shape[1] - len(norm)
    half = rope // 2
    if num_tokens > 0:
        # The first program of a token has its latent, the others some of the query heads each.
        _latent_store_kernel[(num_tokens, 1 + cdiv(num_heads, _HEADS))](
            q, latents, norm, rotation.cos_sin, at.positions, at.slots, cache,
            q.stride(0), q.stride(1), latents.stride(0), cache.stride(0), cache.stride(2),
            rotation.eps, 1.0 / kv.scales.k,
            NUM_HEADS=num_heads, NOPE=qk_dim - rope, RANK=rank, RANK_PADDED=next_power_of_2(rank), HALF=half,
            HALF_PADDED=next_power_of_2(half), HEADS=_HEADS, PAGE_SIZE=cache.shape[2],
            FP8=cache.dtype == FP8, LARGEST=largest_number(cache.dtype), num_warps=2, **pdl_options(pdl),
        )  # fmt: skip
    return q


@triton.jit
def _latent_store_kernel(
    q_ptr, latent_ptr, norm_ptr, cos_sin_ptr, positions_ptr, slots_ptr, cache_ptr,
    q_stride_t, q_stride_h, x_stride, kv_stride_page, kv_stride_token, eps, k_inverse,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_PADDED)
    i_ok = i < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + i, mask=i_ok, other=0.0)
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + i, mask=i_ok, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        target = cache_ptr + (slot // PAGE_SIZE) * kv_stride_page + (slot % PAGE_SIZE) * kv_stride_token
        source = latent_ptr + token * x_stride
        d = tl.arange(0, RANK_PADDED)
        d_ok = d < RANK
        latent = tl.load(source + d, mask=d_ok, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + d, mask=d_ok, other=0.0).to(tl.float32)
        normed = latent / tl.sqrt(tl.sum(latent * latent, 0) / RANK + eps) * weight
        cached: tl.constexpr = cache_ptr.dtype.element_ty
        tl.store(target + d, _stored(normed, k_inverse, cached, FP8, LARGEST), mask=d_ok)
        key = tl.load(source + RANK + i, mask=i_ok, other=0.0).to(tl.float32)
        other = tl.load(source + RANK + HALF + i, mask=i_ok, other=0.0).to(tl.float32)
        turned_key, turned_other = key * cos - other * sin, other * cos + key * sin
        tl.store(target + RANK + i, _stored(turned_key, k_inverse, cached, FP8, LARGEST), mask=i_ok)
        tl.store(target + RANK + HALF + i, _stored(turned_other, k_inverse, cached, FP8, LARGEST), mask=i_ok)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        ok = (head < NUM_HEADS)[:, None] & i_ok[None, :]
        address = q_ptr + token * q_stride_t + head[:, None] * q_stride_h + NOPE + i[None, :]
        first = tl.load(address, mask=ok, other=0.0).to(tl.float32)
        second = tl.load(address + HALF, mask=ok, other=0.0).to(tl.float32)
        turned_first = first * cos[None, :] - second * sin[None, :]
        turned_second = second * cos[None, :] + first * sin[None, :]
        tl.store(address, turned_first.to(q_ptr.dtype.element_ty), mask=ok)
        tl.store(address + HALF, turned_second.to(q_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _stored(x, inverse, dtype: tl.constexpr, FP8: tl.constexpr, LARGEST: tl.constexpr):
    if FP8:
        return to_cache(x, inverse, dtype, LARGEST)
    else:
        return x.to(dtype)
