"""Experts in MXFP4 for a few tokens and for many, in the Triton language: two grouped GEMMs.

The kernels, and the layouts of their weights and inputs, are in mxfp4_gemm.py.

`pdl`: programmatic dependent launch, whose rules are in linear/small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import cdiv, next_power_of_2, pdl_options
from minisgl_backend.kernels.linear.workspace import LinearWorkspace
from minisgl_backend.kernels.moe import few_tokens
from minisgl_backend.kernels.moe import mxfp4_gemm as kernels
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.mxfp4_torch import Biases, Weight
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory

_SCALES_PADDED = 16  # rows of scales are padded to a multiple of it: tiles may read beyond the row's end
ARRANGED = 128  # inputs, four blocks
ARRANGED_PAIRS = 64  # pairs of a tile from which on inputs are arranged
MEAN_PAIRS = (12, 24, 48)  # pairs per expert: upper bounds of the ranges for which each tiling is best
LARGEST_SCALE = 128  # E8M0: 2^126 times the scale has to fit into a bfloat16


@dataclass(frozen=True)
class GemmShape:
    """Tiling of one GEMM: outputs per tile (rows of the weight), inputs per step, warps, stages.

    At least 4 bytes of scales per thread and step: otherwise they are not prefetched.
    """

    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Mxfp4Shape:
    """Tilings of the two GEMMs of a mixture, and pairs of (token, expert) per tile."""

    tile_pairs: int
    gate_up: GemmShape
    down: GemmShape


def few_shape(num_tokens: int) -> Mxfp4Shape:
    """Tiling for the plan of few_tokens. Measured best on an H100, 4 of 32 experts of 2,880 x 2,880."""
    if num_tokens <= 8:
        return Mxfp4Shape(few_tokens.SLOTS, GemmShape(64, 256, 4, 4), GemmShape(64, 256, 4, 3))
    if num_tokens <= 32:
        return Mxfp4Shape(few_tokens.SLOTS, GemmShape(128, 256, 4, 3), GemmShape(64, 256, 4, 4))
    return Mxfp4Shape(few_tokens.SLOTS, GemmShape(128, 128, 4, 3), GemmShape(128, 256, 4, 3))


def grouped_shape(pairs: int, num_experts: int, element_size: int = 2, shared: int = LARGEST) -> Mxfp4Shape:
    """Tiling for sorted pairs, by the pairs per expert; measured likewise. Tiles are small for numbers of four bytes,
    and not large where `shared` memory is smaller than Hopper's."""
    if element_size > 2:
        return _alike(16, GemmShape(64, 128, 4, 2))
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if pairs <= few:
        return _alike(16, GemmShape(128, 128, 4, 4))
    if pairs <= some:
        return _alike(32, GemmShape(128, 128, 4, 4))
    if pairs <= many or shared < LARGEST:
        return _alike(64, GemmShape(128, 128, 4, 3))
    return _alike(128, GemmShape(256, 128, 8, 3))


def _alike(tile_pairs: int, cut: GemmShape) -> Mxfp4Shape:
    return Mxfp4Shape(tile_pairs, cut, cut)


def pack(blocks: torch.Tensor, scales: torch.Tensor) -> Weight:
    """A checkpoint's blocks uint8 [experts, outputs, blocks, 16] and scales uint8 [experts, outputs, blocks] -> numbers
    int16 [experts, outputs, 8 * blocks] in the order of these kernels, and scales with padded rows."""
    experts, outputs, count, _ = blocks.shape
    words = torch.empty((experts, outputs, 8 * count), dtype=torch.int16, device=blocks.device)
    for expert in range(experts):
        numbers = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2).unflatten(-1, (4, 8))
        first, second, third, last = numbers.int().unbind(-2)
        word = _spread(first) << 6 | _spread(second) << 3 | _spread(third)
        word |= (last & 8) << 11 | (last & 4) << 11 | (last & 3) << 10
        words[expert] = word.flatten(-2)  # wraps around: the bits are what matters
    return words, torch.nn.functional.pad(scales, (0, -scales.shape[-1] % _SCALES_PADDED))


def _spread(number: torch.Tensor) -> torch.Tensor:
    """Spreads a 4-bit number: its sign 9 bits above the lowest bit, the distance that they have in a bfloat16."""
    return (number & 8) << 6 | number & 7


def moe(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    biases: Biases | None = None,
    *,
    shape: Mxfp4Shape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See `Mxfp4Kernels.moe`, with weights of `pack`; nothing waits for the device."""
    (num_experts, hidden, quarter), k, pairs = down[0].shape, expert_ids.shape[1], expert_ids.numel()
    size = 4 * quarter
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    shape = shape or grouped_shape(pairs, num_experts, x.element_size(), shared_memory(x.device))
    is_arranged = shape.tile_pairs >= ARRANGED_PAIRS
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    x = _arranged(x) if is_arranged else x
    padded = cdiv(size, ARRANGED) * ARRANGED if is_arranged else size
    activated = torch.empty((pairs, padded), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    count = tiles.expert.numel()
    shared = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    cut = shape.gate_up
    kernels.grouped_kernel[(cdiv(2 * size, cut.tile_out), count)](
        x, *gate_up, gate_up[0] if inner is None else inner, activated, *shared, x.stride(0), padded, SIZE_OUT=2 * size,
        SIZE_IN=hidden, GATED=True, ACTIVATION=activation, BIAS=inner is not None, ARRANGED=is_arranged,
        **_options(x, gate_up, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    cut = shape.down
    kernels.grouped_kernel[(cdiv(hidden, cut.tile_out), count)](
        activated, *down, down[0] if outer is None else outer, result, *shared, padded, hidden, SIZE_OUT=hidden,
        SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None, ARRANGED=is_arranged,
        **_options(x, down, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def _arranged(x: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, size] reordered within each 128 inputs, so that those with the same index in their blocks are
    adjacent: [num_tokens, size padded to a multiple of 128], undefined in the padding."""
    num_tokens, size = x.shape
    padded = cdiv(size, ARRANGED) * ARRANGED
    out = torch.empty((num_tokens, padded), dtype=x.dtype, device=x.device)
    kernels.arrange_kernel[(num_tokens,)](
        x, out, x.stride(0), SIZE=size, STRIDE=padded, PADDED=next_power_of_2(size), num_warps=4
    )
    return out


def mixture_of_few(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    experts_per_token: int,
    renormalize: bool,
    workspace: LinearWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    router_bias: torch.Tensor | None = None,
    biases: Biases | None = None,
    shape: Mxfp4Shape | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """See `Mxfp4Kernels.mixture`; for few tokens (choose.py), with weights of `pack`."""
    (_, hidden, quarter), k, num_tokens = down[0].shape, experts_per_token, len(x)
    size, shape = 4 * quarter, shape or few_shape(num_tokens)
    normed, plan = few_tokens.route(
        x, router, k, renormalize, workspace, norm_weight=norm_weight, eps=eps, bias=router_bias, pdl=pdl
    )
    activated = torch.empty((num_tokens * k, size), dtype=x.dtype, device=x.device)
    result = torch.empty((num_tokens * k, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    cut = shape.gate_up
    kernels.few_kernel[(cdiv(2 * size, cut.tile_out), plan.max_tiles)](
        normed, *gate_up, gate_up[0] if inner is None else inner, activated, plan.tiles, plan.weights,
        normed.stride(0), SIZE_OUT=2 * size, SIZE_IN=hidden, GATED=True, ACTIVATION=activation,
        BIAS=inner is not None, PACKED=plan.is_packed, **_options(x, gate_up, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    cut = shape.down
    kernels.few_kernel[(cdiv(hidden, cut.tile_out), plan.max_tiles)](
        activated, *down, down[0] if outer is None else outer, result, plan.tiles, plan.weights, activated.stride(0),
        SIZE_OUT=hidden, SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None, PACKED=plan.is_packed,
        **_options(x, down, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def _options(
    x: torch.Tensor, weight: Weight, cut: GemmShape, tile_pairs: int, k: int, pdl: bool
) -> dict[str, int | bool]:
    """Launch arguments of both kernels. Two-byte dtypes use inline assembly, which Triton's interpreter does not
    support."""
    return {
        "K": k, "SCALES": weight[1].shape[-1], "PAIRS": tile_pairs, "TILE_OUT": cut.tile_out, "TILE_IN": cut.tile_in,
        "MACHINE": x.device.type == "cuda" and x.element_size() == 2, "num_warps": cut.num_warps,
        "num_stages": cut.num_stages, **pdl_options(pdl),
    }  # fmt: skip
