"""A mixture of experts for one token, in the Triton language: bound by reading the weights of the experts picked.

Three kernels from hidden state to hidden state. The first computes the router's logits of the normed state, and writes
a copy of them for each choice; or early_router.py has done so already, in parallel with o_proj. Every program of the
other two picks its experts itself, which is faster than waiting for one program that picks for all; the copies keep
programs from contending for one address. The second kernel also norms. The third computes the experts' outputs, and
adds them and the residual in a fixed order.

`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py, with one deliberate exception: the second
kernel lets the third start only after its own wait. So the third can read what the first wrote as soon as it starts: it
knows its experts, and loads weights while the second still runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.fp8.scaled import Streamed, load_scales, operand_of, scales_of, sums_of_rows
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels


class TokenShape(NamedTuple):
    """Tiling of one GEMM: outputs (after gating) per tile, inputs per step, warps."""

    tile_out: int
    tile_in: int
    num_warps: int


# Measured best on an H200, 8 of 128 experts of 2,048 x 768.
GATE_UP, DOWN, ROUTE = TokenShape(4, 2048, 4), TokenShape(8, 256, 8), TokenShape(2, 2048, 8)
# Largest number of programs over all experts, so that all run at once. Each picks its expert once, for two tiles; of
# FP8, whose tiles are half as many bytes, for one (measured on an H100).
GATE_UP_PROGRAMS, SCALED_PROGRAMS = 800, 1600


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Streamed], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for one token."""
    pdl = kernels.ops.pdl(x)
    return by_logits(x, route(x, call, experts.experts_per_token, pdl=pdl), experts, call, pdl=pdl)


def route(
    x: torch.Tensor,
    call: MixtureCall,
    experts_per_token: int,
    *,
    normed: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """A token's logits [k, num_experts]: a copy for each choice. normed [1, hidden] receives norm(x), where it is
    given."""
    router, bias, norm_weight = call.router, call.router_bias, call.norm_weight
    assert router is not None, "choose.py gives this file calls with one"
    (num_experts, hidden), k = router.shape, experts_per_token
    logits = torch.empty((k, num_experts), dtype=x.dtype, device=x.device)
    norm_or_x = norm_weight if norm_weight is not None else x
    _route_kernel[(cdiv(num_experts, ROUTE.tile_out),)](
        x, norm_or_x, router, router if bias is None else bias, logits, logits if normed is None else normed, call.eps,
        SIZE_IN=hidden, SIZE_PADDED=next_power_of_2(hidden), EXPERTS=num_experts, TILE=ROUTE.tile_out, K=k,
        K_PADDED=next_power_of_2(k), NORM=norm_weight is not None, BIAS=bias is not None,
        STORE=normed is not None, num_warps=ROUTE.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return logits


def by_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    experts: Experts[Streamed],
    call: MixtureCall,
    *,
    divided: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """`mixture` after the router: logits [k, num_experts] are k copies of a token's logits. `divided`: False where
    they still have to be divided by the RMS of x."""
    num_experts, hidden, size, k = experts.num_experts, experts.hidden_size, experts.intermediate_size, len(logits)
    gate_up, gate_up_scale, gate_up_format = operand_of(experts.gate_up)
    down, down_scale, down_format = operand_of(experts.down)
    inner, outer, norm_weight, residual = experts.gate_up_bias, experts.down_bias, call.norm_weight, call.residual
    activated = torch.empty((k, size), dtype=x.dtype, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    out = torch.empty((1, hidden), dtype=x.dtype, device=x.device)
    norm_or_x, norm = norm_weight if norm_weight is not None else x, {"NORM": norm_weight is not None}
    padded = next_power_of_2(hidden)
    choices = {"K": k, "K_PADDED": next_power_of_2(k)}
    ranked = {"EXPERTS": num_experts, "EXPERTS_PADDED": next_power_of_2(num_experts), "DIVIDED": divided}
    tile_out = max(1, GATE_UP.tile_out * GATE_UP.tile_in // padded)
    most = SCALED_PROGRAMS if gate_up_format["SCALED"] else GATE_UP_PROGRAMS
    programs = min(max(1, most // k), cdiv(size, tile_out))
    _gate_up_kernel[(k, programs)](
        x, norm_or_x, logits, gate_up, gate_up_scale, x if inner is None else inner, activated, scale, call.eps,
        SIZE_OUT=size, SIZE_IN=hidden, SIZE_PADDED=padded, TILE_OUT=tile_out, PROGRAMS=programs,
        WARPS=GATE_UP.num_warps, ACTIVATION=experts.activation, BIAS=inner is not None, **gate_up_format, **ranked,
        **norm, num_warps=GATE_UP.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    _down_kernel[(cdiv(hidden, DOWN.tile_out),)](
        activated, logits, down, down_scale, x if outer is None else outer, x if residual is None else residual, scale,
        out, SIZE_OUT=hidden, SIZE_IN=size, TILE_OUT=DOWN.tile_out, TILE_IN=DOWN.tile_in,
        RENORMALIZE=experts.renormalize, RESIDUAL=residual is not None, BIAS=outer is not None, WARPS=DOWN.num_warps,
        **down_format, **choices, **ranked, num_warps=DOWN.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _route_kernel(
    x_ptr, norm_ptr, router_ptr, bias_ptr, logits_ptr, normed_ptr, eps,
    EXPERTS: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr,
    TILE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K copies of a single token's logits, a few experts per program."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    o = tl.program_id(0) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, SIZE_PADDED)
    i_ok = i < SIZE_IN
    ok = (o < EXPERTS)[:, None] & i_ok[None, :]
    w = tl.load(router_ptr + o[:, None] * SIZE_IN + i[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
    x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE_IN + eps)
        x = x * norm
    if STORE and tl.program_id(0) == 0:
        tl.store(normed_ptr + i, (x * scale).to(normed_ptr.dtype.element_ty), mask=i_ok)
    sums = tl.sum(w * x[None, :], 1) * scale
    if BIAS:
        sums += tl.load(bias_ptr + o, mask=o < EXPERTS, other=0.0).to(tl.float32)
    sums = sums.to(logits_ptr.dtype.element_ty)
    c = tl.arange(0, K_PADDED)
    copies_ok = (o < EXPERTS)[:, None] & (c < K)[None, :]
    copies = tl.broadcast_to(sums[:, None], [TILE, K_PADDED])
    tl.store(logits_ptr + c[None, :] * EXPERTS + o[:, None], copies, mask=copies_ok)


GONE = tl.constexpr(-2147483648)  # below the key of any expert


@triton.jit
def order_keys(logit, e, EXPERTS: tl.constexpr):
    """Distinct integers in the order of experts: a larger logit first, of equal ones the lower expert, and NaN last.

    The logits of experts e are 16-bit numbers in float32, so their lower bits are unused and hold the expert.
    """
    known = tl.where(logit == logit, logit, -float("inf"))
    known = tl.where(known == 0.0, 0.0, known)  # also -0.0, whose bits are those of another integer
    bits = known.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) & -256) | (255 - e)
    return tl.where(e < EXPERTS, key, GONE)


@triton.jit
def expert_of_key(key):
    """The expert of an `order_keys` key."""
    return (255 - (key & 255)).to(tl.int64)


@triton.jit
def logit_of_key(key):
    """The logit of an `order_keys` key, in float32; -inf for NaN and for padding."""
    ordered = key & -256
    bits = tl.where(ordered < 0, (ordered ^ 0x7FFFFFFF) & -256, ordered)
    return tl.where(key == GONE, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def keys(logits_ptr, copy, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, WARPS: tl.constexpr):
    """`order_keys` [warps, experts] of a copy, the same for each warp, which then picks the best without the others."""
    e = tl.arange(0, EXPERTS_PADDED)
    # Not from L1, which may still hold an earlier layer's logits; and volatile, so that it is loaded exactly once.
    logit = tl.load(logits_ptr + copy * EXPERTS + e, mask=e < EXPERTS, other=0.0, volatile=True).to(tl.float32)
    return order_keys(logit, e, EXPERTS)[None, :] + tl.zeros([WARPS, 1], tl.int32)


@triton.jit
def pick(key, choice):
    """The expert, int64, that is a token's choice number `choice` (from 0 on), by `keys`."""
    best = tl.max(key, 1)
    for _ in tl.range(choice):
        key = tl.where(key == best[:, None], GONE, key)
        best = tl.max(key, 1)
    return expert_of_key(tl.max(best, 0))


@triton.jit
def pick_all(
    logits_ptr, copy, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Keys [K_PADDED] of the experts that a token takes, best first, and the logits [WARPS, EXPERTS_PADDED] of all."""
    c = tl.arange(0, K_PADDED)
    key = keys(logits_ptr, copy, EXPERTS, EXPERTS_PADDED, WARPS)
    logits = logit_of_key(key)
    picked = tl.full([K_PADDED], GONE, tl.int32)
    for choice in tl.static_range(K):
        best = tl.max(key, 1)
        picked = tl.where(c == choice, tl.max(best, 0), picked)
        key = tl.where(key == best[:, None], GONE, key)
    return picked, logits


@triton.jit
def _gate_up_kernel(
    x_ptr, norm_ptr, logits_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, scale_ptr, eps,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    SIZE_PADDED: tl.constexpr, TILE_OUT: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, DIVIDED: tl.constexpr, SCALED: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[choice] = activation(gate @ norm(x)) * (up @ norm(x)) for each expert of the token."""
    choice = tl.program_id(0)
    i = tl.arange(0, SIZE_PADDED)
    i_ok = i < SIZE_IN
    if NORM:
        norm = tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    key = keys(logits_ptr, choice, EXPERTS, EXPERTS_PADDED, WARPS)
    x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE_IN + eps)
        x = x * norm
    if not DIVIDED and choice + tl.program_id(1) == 0:
        tl.store(scale_ptr, scale)
    expert = pick(key, choice)
    for tile in tl.range(tl.program_id(1), (SIZE_OUT + TILE_OUT - 1) // TILE_OUT, PROGRAMS):
        o = tile * TILE_OUT + tl.arange(0, TILE_OUT)
        o_ok = o < SIZE_OUT
        at = weight_ptr + (expert * (2 * SIZE_OUT) + o)[:, None] * SIZE_IN + i[None, :]
        ok = o_ok[:, None] & i_ok[None, :]
        scales = scales_of(weight_scale_ptr, expert, o, 2 * SIZE_OUT, SIZE_IN, BLOCK_OUT, BLOCK_IN)
        up_scales = scales_of(weight_scale_ptr, expert, o + SIZE_OUT, 2 * SIZE_OUT, SIZE_IN, BLOCK_OUT, BLOCK_IN)
        gate_scale = load_scales(scales, o_ok, 0, SIZE_IN, SIZE_PADDED, SCALED, BLOCK_IN)
        up_scale = load_scales(up_scales, o_ok, 0, SIZE_IN, SIZE_PADDED, SCALED, BLOCK_IN)
        # Evicted first from the L2 cache: these are not read again in this step, but states and norms are.
        gate = tl.load(at, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(at + SIZE_OUT * SIZE_IN, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gate_sum = sums_of_rows(gate * x[None, :], gate_scale, SCALED, BLOCK_IN) * scale
        up_sum = sums_of_rows(up * x[None, :], up_scale, SCALED, BLOCK_IN) * scale
        if BIAS:
            bias_at = bias_ptr + expert * (2 * SIZE_OUT) + o
            gate_sum += tl.load(bias_at, mask=o_ok, other=0.0).to(tl.float32)
            up_sum += tl.load(bias_at + SIZE_OUT, mask=o_ok, other=0.0).to(tl.float32)
        result = gate_mul(gate_sum, up_sum, ACTIVATION)
        tl.store(out_ptr + choice * SIZE_OUT + o, result.to(out_ptr.dtype.element_ty), mask=o_ok)


@triton.jit
def shares_of_picked(below, others, ok, RENORMALIZE: tl.constexpr):
    """Weights of the picked experts, from their logits and those of all experts [warps, experts], both minus the
    largest logit."""
    share = tl.where(ok, tl.exp(below), 0.0)
    if RENORMALIZE:
        return share / tl.sum(share, 0)
    else:
        return share / tl.max(tl.sum(tl.exp(others), 1), 0)


@triton.jit
def _down_kernel(
    x_ptr, logits_ptr, weight_ptr, weight_scale_ptr, bias_ptr, residual_ptr, scale_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
    RENORMALIZE: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, WARPS: tl.constexpr, DIVIDED: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of down @ x[choice] over the token's experts, and its residual."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    c = tl.arange(0, K_PADDED)
    c_ok = c < K
    # Logits were written by an earlier kernel than the previous one.
    picked, logits = pick_all(logits_ptr, tl.program_id(0) % K, EXPERTS, EXPERTS_PADDED, K, K_PADDED, WARPS)
    expert = expert_of_key(picked)
    top = logit_of_key(tl.max(picked, 0))
    below, others = logit_of_key(picked) - top, logits - top
    if DIVIDED:
        pair_weight = shares_of_picked(below, others, c_ok, RENORMALIZE)
    o = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    rows = weight_ptr + (expert[:, None] * SIZE_OUT + o[None, :]) * SIZE_IN
    rows_ok = c_ok[:, None] & o_ok[None, :]
    scales = scales_of(weight_scale_ptr, expert[:, None], o[None, :], SIZE_OUT, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    # Products of inputs that share a scale are added up at once.
    acc = tl.zeros([K_PADDED, TILE_OUT, TILE_IN // BLOCK_IN if BLOCK_IN else TILE_IN], tl.float32)
    for step in tl.static_range(0, (SIZE_IN + TILE_IN - 1) // TILE_IN):
        i = step * TILE_IN + k
        i_ok = i < SIZE_IN
        step_scales = load_scales(scales, rows_ok, step * TILE_IN, SIZE_IN, TILE_IN, SCALED, BLOCK_IN)
        w_at, w_ok = rows[:, :, None] + i[None, None, :], rows_ok[:, :, None] & i_ok[None, None, :]
        w = tl.load(w_at, mask=w_ok, other=0.0, eviction_policy="evict_first")
        if PDL and step == 0:
            tl_cuda.gdc_wait()
        if not DIVIDED and step == 0:
            scale = tl.load(scale_ptr, cache_modifier=".cg")
        x = tl.load(x_ptr + c[:, None] * SIZE_IN + i[None, :], mask=c_ok[:, None] & i_ok[None, :], other=0.0)
        products = w.to(tl.float32) * x.to(tl.float32)[:, None, :]
        if BLOCK_IN:
            parts = tl.reshape(products, (K_PADDED, TILE_OUT, TILE_IN // BLOCK_IN, BLOCK_IN))
            acc += tl.sum(parts, 3) * step_scales
        else:
            acc += products
    if not DIVIDED:
        others = tl.where(others == -float("inf"), others, others * scale)  # scale may be 0
        pair_weight = shares_of_picked(below * scale, others, c_ok, RENORMALIZE)
    sums = tl.sum(acc, 2)
    if SCALED and BLOCK_IN == 0:
        sums *= step_scales
    if BIAS:
        bias_at = bias_ptr + expert[:, None] * SIZE_OUT + o[None, :]
        sums += tl.load(bias_at, mask=rows_ok, other=0.0).to(tl.float32)
    result = tl.sum(sums * pair_weight[:, None], 0)
    if RESIDUAL:
        result += tl.load(residual_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + o, result.to(out_ptr.dtype.element_ty), mask=o_ok)
