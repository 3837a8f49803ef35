"""`MixtureKernels` on a GPU: routers in the Triton language, each in one kernel.

By a softmax over all logits; or by sigmoid scores, groups of experts, a correction bias, a scaling factor (DeepSeek-V2
and V3, GLM-4.5, Llama 4): in torch a chain of a dozen kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.moe.call import Picked
from minisgl_backend.kernels.moe.mixtures import MixtureKernels
from minisgl_backend.kernels.moe.router_config import BEST_OF_GROUP, RouterConfig
from minisgl_backend.kernels.triton_ops import TritonOps

MAX_EXPERTS = 1024  # of scores: a warp holds them in registers
assert BEST_OF_GROUP == 2, "the kernel adds up a group's two best"


class TritonMixtureKernels(MixtureKernels):
    """See `MixtureKernels`. Of equal scores the lower expert comes first; whatever the logits are, a token takes
    different experts."""

    ops: TritonOps

    def route(self, logits: torch.Tensor, experts_per_token: int, renormalize: bool) -> Picked:
        (num_tokens, num_experts), k, picked = logits.shape, experts_per_token, _empty(logits, experts_per_token)
        if num_tokens > 0:
            _route_kernel[(num_tokens,)](
                logits, *picked, logits.stride(0), EXPERTS=num_experts, EXPERTS_PADDED=next_power_of_2(num_experts),
                K=k, K_PADDED=next_power_of_2(k), RENORMALIZE=renormalize, num_warps=1,
                **pdl_options(self.ops.moe_pdl(logits)),
            )  # fmt: skip
        return picked

    def choose_experts(
        self, logits: torch.Tensor, router: RouterConfig, k: int, correction_bias: torch.Tensor | None = None
    ) -> Picked:
        num_tokens, num_experts = logits.shape
        if num_experts > MAX_EXPERTS:
            return super().choose_experts(logits, router, k, correction_bias)
        picked, size = _empty(logits, k), num_experts // router.num_groups
        if num_tokens > 0:
            _score_router_kernel[(num_tokens,)](
                logits, logits if correction_bias is None else correction_bias, *picked, logits.stride(0),
                EXPERTS=num_experts, GROUPS=router.num_groups, GROUPS_PADDED=next_power_of_2(router.num_groups),
                SIZE=size, SIZE_PADDED=next_power_of_2(size), BEST_GROUPS=router.groups_per_token,
                PAIRS=correction_bias is not None, K=k, K_PADDED=next_power_of_2(k),
                SIGMOID=router.scores == "sigmoid", BY_LOGITS=router.by_logits, RENORMALIZE=router.renormalize,
                SCALING=router.scaling, num_warps=1, **pdl_options(self.ops.moe_pdl(logits)),
            )  # fmt: skip
        return picked


def _empty(logits: torch.Tensor, k: int) -> Picked:
    ids = torch.empty((len(logits), k), dtype=torch.int64, device=logits.device)
    return Picked(ids, torch.empty((len(logits), k), dtype=torch.float32, device=logits.device))


@triton.jit
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, logits_stride,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS_PADDED)
    logits = tl.load(logits_ptr + token * logits_stride + e, mask=e < EXPERTS, other=-float("inf")).to(tl.float32)
    shares = tl.exp(logits - tl.max(logits, 0))
    shares = shares / tl.sum(shares, 0)
    j = tl.arange(0, K_PADDED)
    ids = tl.zeros([K_PADDED], tl.int32)
    weights = tl.zeros([K_PADDED], tl.float32)
    left = tl.where(e < EXPERTS, shares, -1.0)  # padding is below every share and never picked
    for choice in tl.static_range(K):
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)  # NaN must not lead out of bounds
        ids = tl.where(j == choice, best, ids)
        weights = tl.where(j == choice, tl.max(left, 0), weights)
        left = tl.where(e == best, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(ids_ptr + token * K + j, ids.to(tl.int64), mask=j < K)
    tl.store(weights_ptr + token * K + j, weights, mask=j < K)


@triton.jit
def _score_router_kernel(
    logits_ptr, bias_ptr, ids_ptr, shares_ptr, logits_stride,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr, BEST_GROUPS: tl.constexpr, PAIRS: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr, BY_LOGITS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALING: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token per program; experts are [groups, experts of a group]. PAIRS: a group's score is the sum of its two
    best experts, which is so with a correction bias."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)
    s = tl.arange(0, SIZE_PADDED)[None, :]
    e = group[:, None] * SIZE + s
    ok = (group[:, None] < GROUPS) & (s < SIZE)
    logits = tl.load(logits_ptr + token * logits_stride + e, mask=ok, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    value = logits if BY_LOGITS else scores
    if PAIRS:
        value += tl.load(bias_ptr + e, mask=ok, other=0.0).to(tl.float32)
    value = tl.where(ok & (value == value), value, -float("inf"))
    if GROUPS > 1:
        of_group = tl.max(value, 1)
        if PAIRS:
            first = tl.min(tl.where(value == of_group[:, None], s, SIZE_PADDED), 1)
            of_group += tl.max(tl.where(s == first[:, None], -float("inf"), value), 1)
        open_groups = (group < GROUPS).to(tl.int32)
        for _ in tl.static_range(BEST_GROUPS):
            best = tl.max(tl.where(open_groups > 0, of_group, -float("inf")), 0)
            picked = tl.min(tl.where((open_groups > 0) & (of_group >= best), group, GROUPS_PADDED), 0)
            open_groups = tl.where(group == picked, 0, open_groups)
        value = tl.where(open_groups[:, None] > 0, -float("inf"), value)
    # In one dimension: a reduction over two dimensions would be two reductions.
    LINE: tl.constexpr = GROUPS_PADDED * SIZE_PADDED
    value, scores, e = tl.reshape(value, [LINE]), tl.reshape(scores, [LINE]), tl.reshape(e, [LINE])
    left = tl.reshape(ok.to(tl.int32), [LINE])
    j = tl.arange(0, K_PADDED)
    ids = tl.zeros([K_PADDED], tl.int32)
    shares = tl.zeros([K_PADDED], tl.float32)
    for choice in tl.static_range(K):
        best = tl.max(tl.where(left > 0, value, -float("inf")), 0)
        picked = tl.min(tl.where((left > 0) & (value >= best), e, EXPERTS - 1), 0)
        ids = tl.where(j == choice, picked, ids)
        shares = tl.where(j == choice, tl.sum(tl.where(e == picked, scores, 0.0), 0), shares)
        left = tl.where(e == picked, 0, left)
    if RENORMALIZE:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    tl.store(ids_ptr + token * K + j, ids.to(tl.int64), mask=j < K)
    tl.store(shares_ptr + token * K + j, shares * SCALING, mask=j < K)
