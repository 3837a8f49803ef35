"""A mixture of experts for one token, in the Triton language: bound by reading the weights of the experts picked.

Three kernels from the hidden state to the hidden state. The first computes the router's logits of the normed state,
and its last program picks the experts. The second norms on its way. The third adds the experts up, and the residual,
where it computes them, in a fixed order.

`pdl`: programmatic dependent launch, whose rules stand in small_linear.py, with one exception made on purpose. The
second kernel lets the third start only after its own wait. So what the first one wrote is there when the third starts:
it knows its experts, and fetches weights while the second still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.small_linear import LinearWorkspace

MAX_EXPERTS = 256  # which one program ranks


@dataclass(frozen=True)
class ProductShape:
    """How one product is cut into programs: outputs (after gating) a tile, inputs a step, warps."""

    tile_out: int
    tile_in: int
    num_warps: int


# Measured best on an H200, 8 of 128 experts of 2,048 x 768.
GATE_UP, DOWN, ROUTE = ProductShape(4, 2048, 4), ProductShape(8, 256, 8), ProductShape(2, 2048, 8)


def serves(x: torch.Tensor, router: torch.Tensor) -> bool:
    """Whether `mixture` does: tiles were chosen for numbers of two bytes."""
    return len(x) == 1 and x.stride(1) == 1 and x.element_size() == 2 and router.shape[0] <= MAX_EXPERTS


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts_per_token: int,
    renormalize: bool,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract is `Ops.mixture`'s, for one token."""
    (num_experts, hidden, size), k = down.shape, experts_per_token
    logits = torch.empty(num_experts, dtype=x.dtype, device=x.device)
    ids = torch.empty(k, dtype=torch.int32, device=x.device)
    weights = torch.empty(k, dtype=torch.float32, device=x.device)
    activated = torch.empty((k, size), dtype=x.dtype, device=x.device)
    out = torch.empty((1, hidden), dtype=x.dtype, device=x.device)
    norm = {"NORM": norm_weight is not None}
    norm_or_x = norm_weight if norm_weight is not None else x
    _route_kernel[(triton.cdiv(num_experts, ROUTE.tile_out),)](
        x, norm_or_x, router, logits, workspace.counters, ids, weights, eps,
        SIZE_IN=hidden, SIZE_PADDED=triton.next_power_of_2(hidden), EXPERTS=num_experts,
        EXPERTS_PADDED=triton.next_power_of_2(num_experts), TILE=ROUTE.tile_out, K=k, RENORMALIZE=renormalize,
        **norm, **launch_options(pdl, ROUTE.num_warps),
    )  # fmt: skip
    _gate_up_kernel[(k, triton.cdiv(size, GATE_UP.tile_out))](
        x, norm_or_x, ids, gate_up, activated, eps, SIZE_OUT=size, SIZE_IN=hidden, TILE_OUT=GATE_UP.tile_out,
        TILE_IN=GATE_UP.tile_in, **norm, **launch_options(pdl, GATE_UP.num_warps),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, DOWN.tile_out),)](
        activated, ids, weights, down, residual if residual is not None else x, out,
        K=k, K_PADDED=triton.next_power_of_2(k), SIZE_OUT=hidden, SIZE_IN=size, TILE_OUT=DOWN.tile_out,
        TILE_IN=DOWN.tile_in, RESIDUAL=residual is not None, **launch_options(pdl, DOWN.num_warps),
    )  # fmt: skip
    return out


def launch_options(pdl: bool, num_warps: int) -> dict[str, int | bool]:
    """Of a kernel with a parameter PDL: whether it starts before the one ahead of it has ended, and its warps."""
    # launch_pdl is passed only where it is wanted: Triton's interpreter does not know the option.
    return {"PDL": pdl, "num_warps": num_warps, **({"launch_pdl": True} if pdl else {})}


@triton.jit
def _route_kernel(
    x_ptr, norm_ptr, router_ptr, logits_ptr, counter_ptr, ids_ptr, weights_ptr, eps,
    SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    TILE: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A lone token's logits, a few experts a program; the program that arrives last picks the best."""
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
    sums = tl.sum(w * x[None, :], 1) * scale
    tl.store(logits_ptr + o, sums.to(logits_ptr.dtype.element_ty), mask=o < EXPERTS)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        e = tl.arange(0, EXPERTS_PADDED)
        logit = tl.load(logits_ptr + e, mask=e < EXPERTS, other=-float("inf"), cache_modifier=".cg").to(tl.float32)
        rank, share = _ranks(e, logit, K, RENORMALIZE)
        tl.store(ids_ptr + rank, e, mask=rank < K)
        tl.store(weights_ptr + rank, share, mask=rank < K)


@triton.jit
def _ranks(e, logit, K: tl.constexpr, RENORMALIZE: tl.constexpr):
    """The rank of each expert, which is the number of experts before it, and its weight. Of equal logits the lower
    expert comes first, what is no number comes last: every rank is some expert's."""
    known = tl.where(logit == logit, logit, -float("inf"))
    mine, other = known[:, None], known[None, :]
    before = (other > mine) | ((other == mine) & (e[None, :] < e[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    share = tl.exp(logit - tl.max(logit, 0))
    if RENORMALIZE:
        share = share / tl.sum(tl.where(rank < K, share, 0.0), 0)
    else:
        share = share / tl.sum(share, 0)
    return rank, share


@triton.jit
def _gate_up_kernel(
    x_ptr, norm_ptr, ids_ptr, weight_ptr, out_ptr, eps,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[choice] = silu(gate @ norm(x)) * (up @ norm(x)) for each expert of the token."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    choice = tl.program_id(0)
    expert = tl.load(ids_ptr + choice).to(tl.int64)
    o = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    rows = weight_ptr + (expert * (2 * SIZE_OUT) + o)[:, None] * SIZE_IN
    gate = tl.zeros([TILE_OUT, TILE_IN], tl.float32)
    up = tl.zeros([TILE_OUT, TILE_IN], tl.float32)
    squares = tl.zeros([TILE_IN], tl.float32)
    for step in tl.static_range(0, (SIZE_IN + TILE_IN - 1) // TILE_IN):
        i = step * TILE_IN + k
        i_ok = i < SIZE_IN
        ok = o_ok[:, None] & i_ok[None, :]
        w_gate = tl.load(rows + i[None, :], mask=ok, other=0.0)
        w_up = tl.load(rows + SIZE_OUT * SIZE_IN + i[None, :], mask=ok, other=0.0)
        x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        gate += w_gate.to(tl.float32) * x[None, :]
        up += w_up.to(tl.float32) * x[None, :]
    gate_sum = tl.sum(gate, 1)
    up_sum = tl.sum(up, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / SIZE_IN + eps)
        gate_sum = gate_sum * scale
        up_sum = up_sum * scale
    result = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(out_ptr + choice * SIZE_OUT + o, result.to(out_ptr.dtype.element_ty), mask=o_ok)


@triton.jit
def _down_kernel(
    x_ptr, ids_ptr, pair_weights_ptr, weight_ptr, residual_ptr, out_ptr,
    K: tl.constexpr, K_PADDED: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weighted sum of down @ x[choice] over the token's experts, and its residual."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    c = tl.arange(0, K_PADDED)
    c_ok = c < K
    # Written before the kernel before this one; by way of the L2 cache, since an earlier layer's may lie in the nearer.
    expert = tl.load(ids_ptr + c, mask=c_ok, other=0, cache_modifier=".cg").to(tl.int64)
    pair_weight = tl.load(pair_weights_ptr + c, mask=c_ok, other=0.0, cache_modifier=".cg")
    o = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    o_ok = o < SIZE_OUT
    k = tl.arange(0, TILE_IN)
    rows = weight_ptr + (expert[:, None] * SIZE_OUT + o[None, :]) * SIZE_IN
    rows_ok = c_ok[:, None] & o_ok[None, :]
    acc = tl.zeros([K_PADDED, TILE_OUT, TILE_IN], tl.float32)
    for step in tl.static_range(0, (SIZE_IN + TILE_IN - 1) // TILE_IN):
        i = step * TILE_IN + k
        i_ok = i < SIZE_IN
        w = tl.load(rows[:, :, None] + i[None, None, :], mask=rows_ok[:, :, None] & i_ok[None, None, :], other=0.0)
        if PDL and step == 0:
            tl_cuda.gdc_wait()
        x = tl.load(x_ptr + c[:, None] * SIZE_IN + i[None, :], mask=c_ok[:, None] & i_ok[None, :], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[:, None, :]
    result = tl.sum(tl.sum(acc, 2) * pair_weight[:, None], 0)
    if RESIDUAL:
        result += tl.load(residual_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + o, result.to(out_ptr.dtype.element_ty), mask=o_ok)
