"""Expert routing by a softmax over all logits, in the Triton language."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import next_power_of_2, pdl_options
from minisgl_backend.kernels.moe.call import Picked


def route(logits: torch.Tensor, experts_per_token: int, renormalize: bool, pdl: bool = False) -> Picked:
    """As `MixtureKernels.route`: logits [num_tokens, num_experts]."""
    num_tokens, num_experts = logits.shape
    ids = torch.empty((num_tokens, experts_per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, experts_per_token), dtype=torch.float32, device=logits.device)
    if num_tokens > 0:
        _route_kernel[(num_tokens,)](
            logits, ids, weights, logits.stride(0), EXPERTS=num_experts,
            EXPERTS_PADDED=next_power_of_2(num_experts), K=experts_per_token,
            K_PADDED=next_power_of_2(experts_per_token), RENORMALIZE=renormalize, num_warps=1,
            **pdl_options(pdl),
        )  # fmt: skip
    return Picked(ids, weights)


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
