"""The plan of a mixture of experts for a few tokens, in the Triton language.

One program plans the GEMMs: it picks the experts from the logits, and gives each expert's tokens their own tile, so
that an expert's weights are read once. Up to MAX_ROUTED_TOKENS tokens, the last program of the router's kernel plans,
and the first ones norm the tokens; for more tokens the plan is a kernel after the router's GEMM.

`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.quantize import QuantizedRows, quantize_groups, quantized_in_groups
from minisgl_backend.kernels.linear.fp8.reference import FP8, LARGEST, LEAST
from minisgl_backend.kernels.linear.plain.small_rows import linear
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.moe.call import MixtureCall
from minisgl_backend.kernels.moe.one_token import GONE, order_keys

MAX_ROUTED_TOKENS = 8  # whose hidden states one program holds in registers together with a row of the router
SLOTS = 16  # tokens of a tile, the fewest rows of a tensor-core GEMM
MAX_PACKED_CHOICES = 15
UNPICKED = tl.constexpr(15)  # four bits, in place of a token's choice


@dataclass(frozen=True)
class Plan:
    """Which pairs of (token, choice) each tile holds, on the device.

    Up to MAX_ROUTED_TOKENS tokens it is packed: a tile is one 64-bit number with the expert, and four bits for each
    token with the index of this expert among its choices, or UNPICKED. So a program waits for one load only.
    """

    tiles: torch.Tensor  # int64 [max_tiles], packed, -1: unused. Else int32, the three below
    weights: torch.Tensor  # float32 [num_tokens, k]

    @property
    def is_packed(self) -> bool:
        return self.tiles.dtype == torch.int64

    @property
    def max_tiles(self) -> int:
        return self.tiles.numel() if self.is_packed else self.tiles.numel() // (2 + SLOTS)

    @property
    def expert(self) -> torch.Tensor:
        """[max_tiles], -1: unused. Only if the plan is not packed, as `count` and `slots`."""
        return self.tiles[: self.max_tiles]

    @property
    def count(self) -> torch.Tensor:
        """[max_tiles], number of pairs of each tile."""
        return self.tiles[self.max_tiles : 2 * self.max_tiles]

    @property
    def slots(self) -> torch.Tensor:
        """[max_tiles, SLOTS], token * k + choice; undefined beyond the count."""
        return self.tiles[2 * self.max_tiles :].view(self.max_tiles, SLOTS)


def plan_few(
    x: torch.Tensor,
    call: MixtureCall,
    experts_per_token: int,
    renormalize: bool,
    workspace: LinearWorkspace,
    pdl: bool = False,
    group: int = 0,
) -> tuple[torch.Tensor | QuantizedRows, Plan]:
    """norm(x) of x [num_tokens, hidden], and the plan of its experts by the call's router. group: inputs of norm(x)
    that share a scale; it is then in FP8, as by `quantize_groups`."""
    router, bias, norm_weight, eps = call.router, call.router_bias, call.norm_weight, call.eps
    assert router is not None, "choose.py gives this file calls with one"
    (num_tokens, hidden), num_experts, k = x.shape, len(router), experts_per_token
    pairs = num_tokens * k
    # An expert with any pairs has one tile, and another for each SLOTS more.
    most = min(pairs, num_experts + pairs // SLOTS if num_tokens > SLOTS else num_experts)
    most = -(-most // 4) * 4  # addresses stay aligned to 16 bytes, for which kernels are compiled
    if num_tokens <= MAX_ROUTED_TOKENS and k <= MAX_PACKED_CHOICES:
        tiles = torch.empty(most, dtype=torch.int64, device=x.device)
    else:
        tiles = torch.empty(most * (2 + SLOTS), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=x.device)
    plan = Plan(tiles, weights)
    normed, scales = _room_for_normed(x, norm_weight is not None, group, pdl)
    sizes = {
        "SIZE_IN": hidden, "SIZE_PADDED": max(next_power_of_2(hidden), group), "EXPERTS": num_experts,
        "EXPERTS_PADDED": next_power_of_2(num_experts), "TOKENS": next_power_of_2(num_tokens), "K": k,
        "RENORMALIZE": renormalize, "SLOTS": SLOTS, "PACKED": plan.is_packed, "NORM": norm_weight is not None,
        "GROUP": group, "LARGEST": LARGEST, "LEAST": LEAST,
    }  # fmt: skip
    result = normed if scales is None else QuantizedRows(normed, scales.t(), num_tokens, x.dtype)
    scales = weights if scales is None else scales
    norm_or_x = x if norm_weight is None else norm_weight
    if num_tokens <= MAX_ROUTED_TOKENS:
        logits = torch.empty((num_tokens, num_experts), dtype=x.dtype, device=x.device)
        _few_router_kernel[(num_experts,)](
            x, norm_or_x, router, router if bias is None else bias, normed, scales, logits, workspace.counters, tiles,
            weights, num_tokens, most, eps, x.stride(0), BIAS=bias is not None, **sizes, num_warps=8,
            **pdl_options(pdl),
        )  # fmt: skip
        return result, plan
    logits = linear(x, router, workspace, GemmCall(norm_weight, eps, bias), pdl=pdl)
    _few_plan_kernel[(1 if norm_weight is None else 1 + num_tokens,)](
        x, norm_or_x, normed, scales, logits, tiles, weights, num_tokens, most, eps, x.stride(0), **sizes,
        num_warps=8, **pdl_options(pdl),
    )  # fmt: skip
    return result, plan


def _room_for_normed(
    x: torch.Tensor, has_norm: bool, group: int, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For norm(x), or x itself where there is no norm; and for scales [groups, num_tokens]."""
    if has_norm and group:
        scales = torch.empty((cdiv(x.shape[1], group), len(x)), dtype=torch.float32, device=x.device)
        return torch.empty(x.shape, dtype=FP8, device=x.device), scales
    if group:
        numbers, columns = quantize_groups(x, group, pdl=pdl)
        return numbers, columns.t()
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if has_norm else x, None


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _few_router_kernel(
    x_ptr, norm_ptr, router_ptr, bias_ptr, normed_ptr, scales_ptr, logits_ptr, counter_ptr, tiles_ptr, weights_ptr,
    num_tokens, most, eps, x_stride,
    SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each program computes one expert's logits. The first ones also norm a token each, the last to arrive plans."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    i = tl.arange(0, SIZE_PADDED)
    i_ok = i < SIZE_IN
    w = tl.load(router_ptr + expert * SIZE_IN + i, mask=i_ok, other=0.0).to(tl.float32)
    if NORM:
        w = w * tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
    t = tl.arange(0, TOKENS)
    t_ok = t < num_tokens
    x_at = x_ptr + t[:, None].to(tl.int64) * x_stride + i[None, :]
    x = tl.load(x_at, mask=t_ok[:, None] & i_ok[None, :], other=0.0).to(tl.float32)
    logits = tl.sum(x * w[None, :], 1)
    if NORM:
        logits = logits / tl.sqrt(tl.sum(x * x, 1) / SIZE_IN + eps)
    if BIAS:
        logits += tl.load(bias_ptr + expert).to(tl.float32)
    tl.store(logits_ptr + t * EXPERTS + expert, logits.to(logits_ptr.dtype.element_ty), mask=t_ok)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if NORM:
        token = expert
        while token < num_tokens:  # once, unless there are fewer experts than tokens
            _norm_token(
                x_ptr, norm_ptr, normed_ptr, scales_ptr, token, num_tokens, eps, x_stride,
                SIZE_IN, SIZE_PADDED, GROUP, LARGEST, LEAST,
            )  # fmt: skip
            token += tl.num_programs(0)
    if arrived == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        _plan(
            logits_ptr, tiles_ptr, weights_ptr, num_tokens, most,
            TOKENS, EXPERTS, EXPERTS_PADDED, K, RENORMALIZE, SLOTS, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "most"])
def _few_plan_kernel(
    x_ptr, norm_ptr, normed_ptr, scales_ptr, logits_ptr, tiles_ptr, weights_ptr, num_tokens, most, eps, x_stride,
    SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    NORM: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first program plans, the others norm a token each."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    if tl.program_id(0) == 0:
        _plan(
            logits_ptr, tiles_ptr, weights_ptr, num_tokens, most,
            TOKENS, EXPERTS, EXPERTS_PADDED, K, RENORMALIZE, SLOTS, PACKED,
        )  # fmt: skip
    elif NORM:
        _norm_token(
            x_ptr, norm_ptr, normed_ptr, scales_ptr, tl.program_id(0) - 1, num_tokens, eps, x_stride,
            SIZE_IN, SIZE_PADDED, GROUP, LARGEST, LEAST,
        )  # fmt: skip


@triton.jit
def _norm_token(
    x_ptr, norm_ptr, out_ptr, scales_ptr, token, num_tokens, eps, x_stride,
    SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr, GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, SIZE_PADDED)
    ok = i < SIZE_IN
    norm = tl.load(norm_ptr + i, mask=ok, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token.to(tl.int64) * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE_IN + eps)
    normed = (x * scale * norm).to(x_ptr.dtype.element_ty)
    if GROUP:
        normed, scales = quantized_in_groups(normed.to(tl.float32), SIZE_PADDED, GROUP, LARGEST, LEAST)
        g = tl.arange(0, SIZE_PADDED // GROUP)
        tl.store(scales_ptr + g * num_tokens + token, scales, mask=g * GROUP < SIZE_IN)
    tl.store(out_ptr + token * SIZE_IN + i, normed, mask=ok)


@triton.jit
def _plan(
    logits_ptr, tiles_ptr, weights_ptr, num_tokens, most,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr,
    RENORMALIZE: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Writes a `Plan` from logits [num_tokens, experts]. Of equal logits the lower expert comes first, and NaN comes
    last: whatever the logits are, a token takes K different experts.

    Logits are compared as integers, whose maximum over a warp is one instruction.
    """
    t = tl.arange(0, TOKENS)[:, None]
    e = tl.arange(0, EXPERTS_PADDED)
    e_row = e[None, :]
    t_ok, e_ok = t < num_tokens, e_row < EXPERTS
    logit = tl.load(logits_ptr + t * EXPERTS + e_row, mask=t_ok & e_ok, other=0.0, cache_modifier=".cg").to(tl.float32)
    logit = tl.where((logit == logit) & e_ok, logit, -float("inf"))
    key = order_keys(logit, e_row, EXPERTS)
    choice = tl.full([TOKENS, EXPERTS_PADDED], K, tl.int32)
    for j in tl.static_range(K):
        mine = key == tl.max(key, 1)[:, None]
        choice = tl.where(mine, j, choice)
        key = tl.where(mine, GONE, key)
    is_pair = (choice < K) & t_ok

    if PACKED:
        choices = tl.sum(tl.where(is_pair, choice, UNPICKED) << (4 * t), 0)
        if TOKENS < 8:
            choices |= -1 << (4 * TOKENS)
        used = (choices != -1).to(tl.int32)
        ends = tl.cumsum(used, 0)
        tile = (e.to(tl.int64) << 32) | (choices.to(tl.int64) & 0xFFFFFFFF)
        tl.store(tiles_ptr + ends - 1, tile, mask=used > 0)
        num_tiles = tl.sum(used, 0)
    else:
        one = is_pair.to(tl.int32)
        count = tl.sum(one, 0)
        tiles = (count + SLOTS - 1) // SLOTS
        begin = tl.cumsum(tiles, 0) - tiles
        slots_ptr = tiles_ptr + 2 * most
        slot = begin[None, :] * SLOTS + tl.cumsum(one, 0) - one  # an expert's tiles are consecutive
        tl.store(slots_ptr + slot, t * K + choice, mask=is_pair)
        for j in tl.static_range((TOKENS + SLOTS - 1) // SLOTS):
            tl.store(tiles_ptr + begin + j, e, mask=j < tiles)
            tl.store(tiles_ptr + most + begin + j, tl.minimum(count - j * SLOTS, SLOTS), mask=j < tiles)
        num_tiles = tl.sum(tiles, 0)
    for start in tl.range(num_tiles, most, EXPERTS_PADDED):
        tl.store(tiles_ptr + start + e, -1, mask=start + e < most)
    share = tl.exp(logit - tl.max(logit, 1)[:, None])
    total = tl.sum(tl.where(choice < K, share, 0.0), 1) if RENORMALIZE else tl.sum(share, 1)
    tl.store(weights_ptr + t * K + choice, share / total[:, None], mask=is_pair)


@triton.jit
def read_tile(tiles_ptr, tile, most, K: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr):
    """Reads a tile of a plan with `most` tiles: expert int64 (negative: unused), pairs int32 [SLOTS], valid [SLOTS].

    The plan was written two kernels before the second GEMM. It is read from the L2 cache, since L1 may still hold an
    earlier layer's plan.
    """
    s = tl.arange(0, SLOTS)
    if PACKED:
        packed = tl.load(tiles_ptr + tile, cache_modifier=".cg")
        expert = packed >> 32
        choice = ((packed >> (4 * s)) & 15).to(tl.int32)
        s_ok = (choice < UNPICKED) & (s < 8)
        pair = s * K + choice
    else:
        expert = tl.load(tiles_ptr + tile, cache_modifier=".cg").to(tl.int64)
        s_ok = s < tl.load(tiles_ptr + most + tile, cache_modifier=".cg")
        pair = tl.load(tiles_ptr + 2 * most + tile * SLOTS + s, cache_modifier=".cg")
    return expert, tl.where(s_ok, pair, 0), s_ok
