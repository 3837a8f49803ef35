"""o_proj and the router of a mixture of experts, for one token, in one kernel of the Triton language.

A router's logits are W norm(r + O a), with residual r, attention output a, router weights W and o_proj weights O. The
norm's division by the RMS does not change the order of the experts, and without it the logits are (W n) r + (W n O) a,
where n are the norm's weights. So with W n O multiplied out when the model is loaded, the router runs in parallel with
o_proj and not after it: one kernel less on the critical path. The kernel that computes the experts' weights divides the
logits.

[W n O, W n] (`EarlyRouter.weight`) is rounded to the model's dtype, like the hidden states that the router would read
otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.fp8.scaled import Streamed, load_scales, operand_of, scales_of, sums_of_rows
from minisgl_backend.kernels.moe import one_token
from minisgl_backend.kernels.moe.call import EarlyRouter, Experts, MixtureCall
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels

# Measured best on an H200 for 2,048 outputs, 4,096 inputs and 128 experts: all programs run at once.
BYTES = 16384  # weights of a program; a program of the router has one expert's
NUM_WARPS = 4


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Streamed], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; of one token with an early router."""
    early, residual, pdl = call.early, call.residual, kernels.ops.pdl(x)
    assert early is not None and residual is not None, "choose.py gives this file calls with them"  # noqa: PT018
    hidden, logits = output_and_logits(x, early, residual, experts.experts_per_token, pdl=pdl)
    return one_token.by_logits(hidden, logits, experts, call._replace(residual=hidden), divided=False, pdl=pdl)


def output_and_logits(
    x: torch.Tensor, early: EarlyRouter, residual: torch.Tensor, experts_per_token: int, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x @ o_proj.T [1, hidden], and undivided logits [experts_per_token, num_experts], the same in each row:
    x [1, size_in], residual [1, hidden], all of one dtype.

    pdl: programmatic dependent launch, whose rules are in plain/small_rows.py.
    """
    o_proj, o_proj_scale, o_proj_format = operand_of(early.o_proj)
    (hidden, size_in), num_experts, k = o_proj.shape, len(early.weight), experts_per_token
    out = torch.empty_like(residual)
    logits = torch.empty((k, num_experts), dtype=x.dtype, device=x.device)
    padded = next_power_of_2(size_in)
    tile = max(1, BYTES // (padded * o_proj.element_size()))
    _output_and_logits_kernel[(num_experts + cdiv(hidden, tile),)](
        x, o_proj, o_proj_scale, residual, early.weight, out, logits, SIZE_OUT=hidden, SIZE_IN=size_in,
        SIZE_PADDED=padded,
        OUT_PADDED=next_power_of_2(hidden), EXPERTS=num_experts, K=k, K_PADDED=next_power_of_2(k),
        TILE=tile, **o_proj_format, num_warps=NUM_WARPS, **pdl_options(pdl),
    )  # fmt: skip
    return out, logits


@triton.jit
def _output_and_logits_kernel(
    x_ptr, weight_ptr, weight_scale_ptr, residual_ptr, early_ptr, out_ptr, logits_ptr,
    SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SIZE_PADDED: tl.constexpr, OUT_PADDED: tl.constexpr,
    EXPERTS: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs compute the logit of one expert each, the others a tile of o_proj."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    i = tl.arange(0, SIZE_PADDED)
    i_ok = i < SIZE_IN
    if program < EXPERTS:
        j = tl.arange(0, OUT_PADDED)
        j_ok = j < SIZE_OUT
        line = early_ptr + program * (SIZE_IN + SIZE_OUT)
        w = tl.load(line + i, mask=i_ok, other=0.0)
        w_residual = tl.load(line + SIZE_IN + j, mask=j_ok, other=0.0)
        if PDL:
            tl_cuda.gdc_wait()
        x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + j, mask=j_ok, other=0.0).to(tl.float32)
        logit = tl.sum(w.to(tl.float32) * x, 0) + tl.sum(w_residual.to(tl.float32) * residual, 0)
        c = tl.arange(0, K_PADDED)
        copies = tl.full([K_PADDED], 0.0, tl.float32) + logit
        tl.store(logits_ptr + c * EXPERTS + program, copies.to(logits_ptr.dtype.element_ty), mask=c < K)
    else:
        o = (program - EXPERTS) * TILE + tl.arange(0, TILE)
        o_ok = o < SIZE_OUT
        at = weight_ptr + o[:, None] * SIZE_IN + i[None, :]
        scale_at = scales_of(weight_scale_ptr, 0, o, SIZE_OUT, SIZE_IN, BLOCK_OUT, BLOCK_IN)
        scales = load_scales(scale_at, o_ok, 0, SIZE_IN, SIZE_PADDED, SCALED, BLOCK_IN)
        tile = tl.load(at, mask=o_ok[:, None] & i_ok[None, :], other=0.0)
        if PDL:
            tl_cuda.gdc_wait()
        added = tl.load(residual_ptr + o, mask=o_ok, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + i, mask=i_ok, other=0.0).to(tl.float32)
        total = sums_of_rows(tile.to(tl.float32) * x[None, :], scales, SCALED, BLOCK_IN) + added
        tl.store(out_ptr + o, total.to(out_ptr.dtype.element_ty), mask=o_ok)
