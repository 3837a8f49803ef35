"""A mixture of experts with FP8 weights in blocks for a few tokens (a decode step of 2 to 32), in the Triton language:
bound by reading the weights of the experts picked, which go to the tensor cores as they lie.

The plan of few_plan.py, whose kernel also quantizes the normed tokens; the GEMM with gate_up, which quantizes what it
writes, in groups of the outputs of a tile; that with down, and the sum. Nothing but these is launched.

`pdl`: as in few_tokens.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from minisgl_backend.kernels.activation import gate_mul_rows
from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import cdiv, pdl_options
from minisgl_backend.kernels.linear.fp8.quantize import QuantizedRows, to_fp8
from minisgl_backend.kernels.linear.fp8.reference import FP8, LARGEST, LEAST, Fp8Weight
from minisgl_backend.kernels.linear.fp8.scaled import scales_of
from minisgl_backend.kernels.moe.call import Experts, MixtureCall
from minisgl_backend.kernels.moe.few_plan import SLOTS, Plan, plan_few, read_tile
from minisgl_backend.kernels.moe.gemms import GemmShape, MixtureShape, Pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.tiles import rows_of_weight, store_pairs, weighted
from minisgl_backend.kernels.shared_memory import shared_memory, stages_that_fit


def few_shape(shared: int) -> MixtureShape[GemmShape]:
    """Measured best on an H200, 8 of 128 experts of 2,048 x 768 in blocks of 128 x 128. shared: bytes of shared memory
    that a program may have."""

    def cut(tile_out: int, tiles: int, stages: int) -> GemmShape:
        return GemmShape(tile_out, 128, 4, stages_that_fit(stages, 128 * (SLOTS + tiles * tile_out), shared))

    return MixtureShape(SLOTS, cut(128, 2, 3), cut(64, 1, 4))


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Fp8Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; of the tokens that choose.py gives to this file."""
    return in_tiles(kernels, x, experts, call, few_shape(shared_memory(x.device)))


def in_tiles(
    kernels: TritonMixtureKernels,
    x: torch.Tensor,
    experts: Experts[Fp8Weight],
    call: MixtureCall,
    shape: MixtureShape[GemmShape],
) -> torch.Tensor:
    """`mixture` in tiles of `shape`; of the GEMM with down, steps of at most a tile's outputs of the other."""
    pdl, k, size = kernels.ops.pdl(x), experts.experts_per_token, experts.intermediate_size
    assert experts.gate_up.block is not None, "choose.py gives this file weights in blocks"
    (_, block_in), group, count = experts.gate_up.block, shape.gate_up.tile_out, len(x) * k
    normed, plan = plan_few(x, call, k, experts.renormalize, kernels.plain.workspace, pdl, block_in)
    assert isinstance(normed, QuantizedRows)
    numbers = torch.empty((count, size), dtype=FP8, device=x.device)
    scales = torch.empty((cdiv(size, group), count), dtype=torch.float32, device=x.device)
    activated = QuantizedRows(numbers, scales.t(), count, x.dtype)
    out = x.new_empty((count, experts.hidden_size))
    pairs = Pairs(plan, plan.weights, k, SLOTS, pdl)
    _gemm(normed, experts.gate_up, activated, pairs, shape.gate_up, block_in, experts.activation)
    _gemm(activated, experts.down, out, pairs, shape.down, group, None)
    return combine(out, k, call.residual, pdl)


def _gemm(
    x: QuantizedRows,
    weight: Fp8Weight,
    out: QuantizedRows | torch.Tensor,
    pairs: Pairs,
    cut: GemmShape,
    group: int,
    activation: str | None,
) -> None:
    """group: inputs that share a scale of x. activation: None: it is the GEMM with down."""
    plan = pairs.plan
    assert isinstance(plan, Plan)
    assert weight.block is not None, "choose.py gives this file weights in blocks"
    (_, size_out), (_, size_in), (block_out, block_in) = out.shape, x.shape, weight.block
    numbers, scales = (out.numbers, out.scales) if isinstance(out, QuantizedRows) else (out, plan.weights)
    _few_quantized_kernel[(plan.max_tiles, cdiv(size_out, cut.tile_out))](
        x.numbers, x.scales, weight.numbers, weight.scale, numbers, scales, plan.tiles, plan.weights, len(x), len(out),
        K=pairs.experts_per_token, SIZE_OUT=size_out, SIZE_IN=size_in, SLOTS=SLOTS, PACKED=plan.is_packed,
        TILE_OUT=cut.tile_out, TILE_IN=min(cut.tile_in, block_in, group), GROUP=group,
        BLOCK_OUT=block_out, BLOCK_IN=block_in, GATED=activation is not None, ACTIVATION=activation, LARGEST=LARGEST,
        LEAST=LEAST, num_warps=cut.num_warps, num_stages=cut.num_stages, **pdl_options(pairs.pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["x_rows", "out_rows"])
def _few_quantized_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, out_ptr, out_scale_ptr, tiles_ptr, pair_weight_ptr, x_rows, out_rows,
    K: tl.constexpr, SIZE_OUT: tl.constexpr, SIZE_IN: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
    TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GROUP: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For each pair. GATED: activation(gate @ x) * (up @ x) in FP8, with x of the pair's token. Else: down @ x, with x
    of the pair, times the pair's weight. GROUP: inputs that share a scale of x, whose scales are [groups, x_rows]."""
    if PDL:
        if GATED:
            tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()
    expert, pair, s_ok = read_tile(tiles_ptr, tl.program_id(0), tl.num_programs(0), K, SLOTS, PACKED)
    if expert < 0:
        return
    o, weight_row, row_ok = rows_of_weight(expert, tl.program_id(1) * TILE_OUT, SIZE_OUT, TILE_OUT, GATED)
    outputs: tl.constexpr = 2 * SIZE_OUT if GATED else SIZE_OUT
    w_scales = scales_of(scale_ptr, expert, weight_row - expert * outputs, outputs, SIZE_IN, BLOCK_OUT, BLOCK_IN)
    w_scale = tl.load(w_scales, mask=row_ok, other=0.0)
    source = pair // K if GATED else pair
    if PDL and not GATED:
        tl_cuda.gdc_wait()
    x_scale = tl.load(x_scale_ptr + source, mask=s_ok, other=0.0)
    x_lines = x_ptr + source.to(tl.int64)[:, None] * SIZE_IN
    weight_rows = weight_ptr + weight_row[:, None] * SIZE_IN
    k = tl.arange(0, TILE_IN)
    acc = tl.zeros([weight_row.shape[0], SLOTS], tl.float32)
    for start in tl.range(0, SIZE_IN, TILE_IN):
        i = start + k
        i_ok = i < SIZE_IN
        w = tl.load(weight_rows + i[None, :], mask=row_ok[:, None] & i_ok[None, :], other=0.0)
        x = tl.load(x_lines + i[None, :], mask=s_ok[:, None] & i_ok[None, :], other=0.0)
        acc += tl.dot(w, tl.trans(x)) * (w_scale[:, None] * x_scale[None, :])
        # Scales of the next step, while its tiles are in flight.
        last = tl.minimum(start + TILE_IN, SIZE_IN - 1)
        w_scale = tl.load(w_scales + last // BLOCK_IN, mask=row_ok, other=0.0)
        x_scale = tl.load(x_scale_ptr + last // GROUP * x_rows + source, mask=s_ok, other=0.0)
    if GATED:
        result = gate_mul_rows(acc, ACTIVATION)
        scale = tl.maximum(tl.max(tl.abs(result), 0), LEAST) / LARGEST
        tl.store(out_scale_ptr + tl.program_id(1) * out_rows + pair, scale, mask=s_ok)
        store_pairs(to_fp8(result / scale[None, :], LARGEST), out_ptr, pair, s_ok, o, SIZE_OUT, False)
    else:
        store_pairs(weighted(acc, pair_weight_ptr, pair, s_ok, False), out_ptr, pair, s_ok, o, SIZE_OUT, False)
