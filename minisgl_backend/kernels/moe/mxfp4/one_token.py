"""Experts in MXFP4 for one token, in the Triton language: bound by reading the weights of the experts picked.

The chain of one_token.py: its router, which also norms the token, then a GEMM with gate_up whose programs find their
expert themselves, and one with down that sums the experts in a fixed order. Tensor cores do not help for one token: a
thread has the 16 bytes of a block and multiplies them with 32 inputs. Moving bits makes a float32 of 2^-126 times the
number, which may be subnormal; so inputs are multiplied by a large power of two.

Weights are those of `grouped.pack`. `pdl`: as in one_token.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.moe import one_token
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.mxfp4.gemm import spread_bits
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight
from minisgl_backend.kernels.moe.one_token import expert_of_key, keys, logit_of_key, pick, pick_all, shares_of_picked


class OneTokenShape(NamedTuple):
    """Tiling of a GEMM: rows of the weight per tile, blocks of 32 inputs per step, warps per program."""

    tile_out: int
    blocks: int
    num_warps: int


# Measured best on an H100 and an H200, 4 of 32 experts of 2,880 x 2,880.
GATE_UP, DOWN = OneTokenShape(8, 32, 1), OneTokenShape(16, 32, 8)
GATE_UP_PROGRAMS = 3200  # over all experts, at most: a program finds its expert once, for one tile (gpt-oss) or a few
UP = tl.constexpr(2.0**60)  # factor of inputs
EXACT = tl.constexpr(2.0**66)  # factor of sums: 126 - 60


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Mxfp4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for one token, with weights of `grouped.pack`."""
    return in_tiles(x, experts, call, GATE_UP, DOWN, kernels.ops.pdl(x))


def in_tiles(
    x: torch.Tensor,
    experts: Experts[Mxfp4Weight],
    call: MixtureCall,
    first: OneTokenShape,
    second: OneTokenShape,
    pdl: bool = False,
) -> torch.Tensor:
    """`mixture` in tiles of these shapes."""
    hidden, size, k = experts.hidden_size, experts.intermediate_size, experts.experts_per_token
    gate_up, down, inner, outer = experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias
    residual, normed = call.residual, x if call.norm_weight is None else torch.empty_like(x)
    logits = one_token.route(x, call, k, normed=None if normed is x else normed, pdl=pdl)
    activated = torch.empty((k, size), dtype=x.dtype, device=x.device)
    out = torch.empty((1, hidden), dtype=x.dtype, device=x.device)
    ranked = {"EXPERTS": experts.num_experts, "EXPERTS_PADDED": next_power_of_2(experts.num_experts)}
    programs = min(max(1, GATE_UP_PROGRAMS // k), cdiv(2 * size, first.tile_out))
    _gate_up_kernel[(k, programs)](
        normed, logits, gate_up.numbers.view(torch.int32), gate_up.scales, x if inner is None else inner, activated,
        SIZE_OUT=size, SIZE_IN=hidden, SCALES=gate_up.scales.shape[-1], BLOCKS=first.blocks, TILE_OUT=first.tile_out,
        PROGRAMS=programs, BIAS=inner is not None, ACTIVATION=experts.activation, WARPS=first.num_warps, **ranked,
        num_warps=first.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    _down_kernel[(cdiv(hidden, second.tile_out),)](
        activated, logits, down.numbers.view(torch.int32), down.scales, x if outer is None else outer,
        x if residual is None else residual, out, SIZE_OUT=hidden, SIZE_IN=size, SCALES=down.scales.shape[-1],
        BLOCKS=second.blocks, TILE_OUT=second.tile_out, K=k, K_PADDED=next_power_of_2(k),
        RENORMALIZE=experts.renormalize, RESIDUAL=residual is not None, BIAS=outer is not None, WARPS=second.num_warps,
        **ranked, num_warps=second.num_warps, **pdl_options(pdl),
    )  # fmt: skip
    return out


@triton.jit
def _add(acc, words, x_ptr, c, c_ok, start, place: tl.constexpr, SIZE_IN: tl.constexpr, BLOCKS: tl.constexpr):
    """acc [choices, rows, blocks, 4] plus two numbers (`place`) of each uint32 word times their inputs."""
    e = tl.arange(0, BLOCKS * 8)
    i = start + (e // 8) * 32 + place * 8 + e % 8
    ok = c_ok[:, None] & (i < SIZE_IN)[None, :]
    x = tl.load(x_ptr + c[:, None] * SIZE_IN + i[None, :], mask=ok, other=0.0).to(tl.float32) * UP
    lower, upper = tl.split(tl.reshape(x, (c.shape[0], BLOCKS, 4, 2)))
    bits = spread_bits(words, place)
    acc += (bits << 16).to(tl.float32, bitcast=True) * lower[:, None, :, :]
    acc += (bits & 0xFFFF0000).to(tl.float32, bitcast=True) * upper[:, None, :, :]
    return acc


@triton.jit
def _load_words(weight_ptr, row, row_ok, start, SIZE_IN: tl.constexpr, BLOCKS: tl.constexpr):
    """uint32 [choices, rows, 4 * blocks] of row int64 [choices, rows] from the input `start` on; evicted first from the
    L2 cache."""
    word = start // 8 + tl.arange(0, 4 * BLOCKS)
    ok = row_ok[:, :, None] & (word < SIZE_IN // 8)[None, None, :]
    at = weight_ptr + row[:, :, None] * (SIZE_IN // 8) + word[None, None, :]
    return tl.load(at, mask=ok, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)


@triton.jit
def _sums(
    words, x_ptr, c, c_ok, scale_ptr, row, row_ok, start,
    SIZE_IN: tl.constexpr, SCALES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """words times the inputs of each choice and scales, times 2^-66: float32 [choices, rows, blocks]."""
    choices: tl.constexpr = words.shape[0]
    rows: tl.constexpr = words.shape[1]
    words = tl.reshape(words, (choices, rows, BLOCKS, 4))
    g = start // 32 + tl.arange(0, BLOCKS)
    ok = row_ok[:, :, None] & (g < SCALES)[None, None, :]
    scale = tl.load(scale_ptr + row[:, :, None] * SCALES + g[None, None, :], mask=ok, other=0).to(tl.int32)
    acc = tl.zeros([choices, rows, BLOCKS, 4], tl.float32)
    acc = _add(acc, words, x_ptr, c, c_ok, start, 0, SIZE_IN, BLOCKS)
    acc = _add(acc, words, x_ptr, c, c_ok, start, 1, SIZE_IN, BLOCKS)
    acc = _add(acc, words, x_ptr, c, c_ok, start, 2, SIZE_IN, BLOCKS)
    acc = _add(acc, words, x_ptr, c, c_ok, start, 3, SIZE_IN, BLOCKS)
    return tl.sum(acc, 3) * (scale << 23).to(tl.float32, bitcast=True)


@triton.jit
def _gate_up_kernel(
    x_ptr, logits_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr,
    SCALES: tl.constexpr, BLOCKS: tl.constexpr, TILE_OUT: tl.constexpr, PROGRAMS: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[choice] = activation(gate @ x) * (up @ x) for each expert of the token. Rows of gate and up alternate."""
    choice = tl.program_id(0)
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert = pick(keys(logits_ptr, choice, EXPERTS, EXPERTS_PADDED, WARPS), choice)
    c = tl.arange(0, 1)  # all experts have the same inputs
    for tile in tl.range(tl.program_id(1), (2 * SIZE_OUT + TILE_OUT - 1) // TILE_OUT, PROGRAMS):
        local = tile * TILE_OUT + tl.arange(0, TILE_OUT)
        ok = local < 2 * SIZE_OUT
        row = expert * (2 * SIZE_OUT) + local
        acc = tl.zeros([1, TILE_OUT, BLOCKS], tl.float32)
        for step in tl.static_range((SIZE_IN + 32 * BLOCKS - 1) // (32 * BLOCKS)):
            words = _load_words(weight_ptr, row[None, :], ok[None, :], step * 32 * BLOCKS, SIZE_IN, BLOCKS)
            acc += _sums(
                words, x_ptr, c, c == 0, weight_scale_ptr, row[None, :], ok[None, :], step * 32 * BLOCKS,
                SIZE_IN, SCALES, BLOCKS,
            )  # fmt: skip
        sums = tl.sum(tl.sum(acc, 2), 0) * EXACT
        if BIAS:
            sums += tl.load(bias_ptr + row, mask=ok, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(sums, (TILE_OUT // 2, 2)))
        o = tile * (TILE_OUT // 2) + tl.arange(0, TILE_OUT // 2)
        result = gate_mul(gate, up, ACTIVATION)
        tl.store(out_ptr + choice * SIZE_OUT + o, result.to(out_ptr.dtype.element_ty), mask=o < SIZE_OUT)


@triton.jit
def _down_kernel(
    x_ptr, logits_ptr, weight_ptr, weight_scale_ptr, bias_ptr, residual_ptr, out_ptr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SCALES: tl.constexpr, BLOCKS: tl.constexpr,
    TILE_OUT: tl.constexpr, RENORMALIZE: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of down @ x[choice] over the token's experts, and its residual. With as many warps as choices,
    each has the rows of one."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    # Logits were written by an earlier kernel than the previous one.
    picked, others = pick_all(logits_ptr, tl.program_id(0) % K, EXPERTS, EXPERTS_PADDED, K, K_PADDED, WARPS)
    c = tl.arange(0, K_PADDED)
    top = logit_of_key(tl.max(picked, 0))
    share = shares_of_picked(logit_of_key(picked) - top, others - top, c < K, RENORMALIZE)
    o = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    row = expert_of_key(picked)[:, None] * SIZE_OUT + o[None, :]
    row_ok = (c < K)[:, None] & o_ok[None, :]
    acc = tl.zeros([K_PADDED, TILE_OUT, BLOCKS], tl.float32)
    for step in tl.static_range((SIZE_IN + 32 * BLOCKS - 1) // (32 * BLOCKS)):
        words = _load_words(weight_ptr, row, row_ok, step * 32 * BLOCKS, SIZE_IN, BLOCKS)
        if PDL and step == 0:
            tl_cuda.gdc_wait()
        acc += _sums(words, x_ptr, c, c < K, weight_scale_ptr, row, row_ok, step * 32 * BLOCKS, SIZE_IN, SCALES, BLOCKS)
    sums = tl.sum(acc, 2) * EXACT
    if BIAS:
        sums += tl.load(bias_ptr + row, mask=row_ok, other=0.0).to(tl.float32)
    result = tl.sum(sums * share[:, None], 0)
    if RESIDUAL:
        result += tl.load(residual_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + o, result.to(out_ptr.dtype.element_ty), mask=o_ok)
