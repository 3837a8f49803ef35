"""Experts in MXFP4 for a few tokens and for many, in the Triton language: two grouped GEMMs.

The kernels, and how their weights and inputs lie in memory, are in mxfp4_gemm.py.

`pdl`: programmatic dependent launch, whose rules stand in linear/small_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.linear.small_rows import LinearWorkspace
from minisgl_backend.kernels.moe import few_tokens
from minisgl_backend.kernels.moe import mxfp4_gemm as kernels
from minisgl_backend.kernels.moe.align import align
from minisgl_backend.kernels.moe.mxfp4_torch import Biases, Weight
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory

_SCALES_PADDED = 16  # the scales of a row are a multiple of it: tiles may read beyond the row's end
ARRANGED = 128  # inputs, four blocks
ARRANGED_PAIRS = 64  # of a tile, from which on inputs are arranged
MEAN_PAIRS = (12, 24, 48)  # of an expert: up to each of them, another cut is best
LARGEST_SCALE = 128  # of E8M0: 2^126 times it has to be a bfloat16


@dataclass(frozen=True)
class ProductShape:
    """How one GEMM is cut: outputs a tile (rows of the weight), inputs a step, warps, stages.

    At least 4 bytes of scales a thread and step: else they are not fetched ahead.
    """

    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Mxfp4Shape:
    """How the two GEMMs of a mixture are cut; pairs of (token, expert) a tile."""

    tile_pairs: int
    gate_up: ProductShape
    down: ProductShape


def few_shape(num_tokens: int) -> Mxfp4Shape:
    """For few_tokens' plan. Measured best on an H100, 4 of 32 experts of 2,880 x 2,880."""
    if num_tokens <= 8:
        return Mxfp4Shape(few_tokens.SLOTS, ProductShape(64, 256, 4, 4), ProductShape(64, 256, 4, 3))
    if num_tokens <= 32:
        return Mxfp4Shape(few_tokens.SLOTS, ProductShape(128, 256, 4, 3), ProductShape(64, 256, 4, 4))
    return Mxfp4Shape(few_tokens.SLOTS, ProductShape(128, 128, 4, 3), ProductShape(128, 256, 4, 3))


def grouped_shape(pairs: int, num_experts: int, element_size: int = 2, shared: int = LARGEST) -> Mxfp4Shape:
    """By the pairs of an expert, likewise. Small tiles for numbers of four bytes, and no large ones where a program has
    less than Hopper's bytes of `shared` memory."""
    if element_size > 2:
        return _alike(16, ProductShape(64, 128, 4, 2))
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if pairs <= few:
        return _alike(16, ProductShape(128, 128, 4, 4))
    if pairs <= some:
        return _alike(32, ProductShape(128, 128, 4, 4))
    if pairs <= many or shared < LARGEST:
        return _alike(64, ProductShape(128, 128, 4, 3))
    return _alike(128, ProductShape(256, 128, 8, 3))


def _alike(tile_pairs: int, cut: ProductShape) -> Mxfp4Shape:
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
    """The sign 9 bits above the lowest, as far as it is in a bfloat16 from the three others."""
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
    """The contract is `Mxfp4Kernels.moe`'s, with weights of `pack`; nothing waits for the device."""
    (num_experts, hidden, quarter), k, pairs = down[0].shape, expert_ids.shape[1], expert_ids.numel()
    size = 4 * quarter
    if pairs == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    shape = shape or grouped_shape(pairs, num_experts, x.element_size(), shared_memory(x.device))
    is_arranged = shape.tile_pairs >= ARRANGED_PAIRS
    tiles = align(expert_ids.contiguous(), num_experts, shape.tile_pairs, pdl)
    x = _arranged(x) if is_arranged else x
    padded = triton.cdiv(size, ARRANGED) * ARRANGED if is_arranged else size
    activated = torch.empty((pairs, padded), dtype=x.dtype, device=x.device)
    result = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    count = tiles.expert.numel()
    shared = (tiles.order, tiles.expert, tiles.first, tiles.end, expert_weights.contiguous())
    cut = shape.gate_up
    kernels.grouped_kernel[(triton.cdiv(2 * size, cut.tile_out), count)](
        x, *gate_up, gate_up[0] if inner is None else inner, activated, *shared, x.stride(0), padded, SIZE_OUT=2 * size,
        SIZE_IN=hidden, GATED=True, ACTIVATION=activation, BIAS=inner is not None, ARRANGED=is_arranged,
        **_options(x, gate_up, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    cut = shape.down
    kernels.grouped_kernel[(triton.cdiv(hidden, cut.tile_out), count)](
        activated, *down, down[0] if outer is None else outer, result, *shared, padded, hidden, SIZE_OUT=hidden,
        SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None, ARRANGED=is_arranged,
        **_options(x, down, cut, shape.tile_pairs, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def _arranged(x: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, size] with the inputs of a place next to each other in each 128: [num_tokens, size padded to
    128s], undefined in the padding."""
    num_tokens, size = x.shape
    padded = triton.cdiv(size, ARRANGED) * ARRANGED
    out = torch.empty((num_tokens, padded), dtype=x.dtype, device=x.device)
    kernels.arrange_kernel[(num_tokens,)](
        x, out, x.stride(0), SIZE=size, STRIDE=padded, PADDED=triton.next_power_of_2(size), num_warps=4
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
    """The contract is `Mxfp4Kernels.mixture`'s, for few tokens (choose.py), with weights of `pack`."""
    (_, hidden, quarter), k, num_tokens = down[0].shape, experts_per_token, len(x)
    size, shape = 4 * quarter, shape or few_shape(num_tokens)
    normed, plan = few_tokens.route(
        x, router, k, renormalize, workspace, norm_weight=norm_weight, eps=eps, bias=router_bias, pdl=pdl
    )
    activated = torch.empty((num_tokens * k, size), dtype=x.dtype, device=x.device)
    result = torch.empty((num_tokens * k, hidden), dtype=x.dtype, device=x.device)
    inner, outer = biases or (None, None)
    cut = shape.gate_up
    kernels.few_kernel[(triton.cdiv(2 * size, cut.tile_out), plan.max_tiles)](
        normed, *gate_up, gate_up[0] if inner is None else inner, activated, plan.tiles, plan.weights,
        normed.stride(0), SIZE_OUT=2 * size, SIZE_IN=hidden, GATED=True, ACTIVATION=activation,
        BIAS=inner is not None, PACKED=plan.is_packed, **_options(x, gate_up, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    cut = shape.down
    kernels.few_kernel[(triton.cdiv(hidden, cut.tile_out), plan.max_tiles)](
        activated, *down, down[0] if outer is None else outer, result, plan.tiles, plan.weights, activated.stride(0),
        SIZE_OUT=hidden, SIZE_IN=size, GATED=False, ACTIVATION=None, BIAS=outer is not None, PACKED=plan.is_packed,
        **_options(x, down, cut, few_tokens.SLOTS, k, pdl),
    )  # fmt: skip
    return combine(result, k, residual, pdl)


def _options(
    x: torch.Tensor, weight: Weight, cut: ProductShape, tile_pairs: int, k: int, pdl: bool
) -> dict[str, int | bool]:
    """What both kernels are launched with. Numbers of two bytes are made by machine instructions, which Triton's
    interpreter does not know."""
    return {
        "K": k, "SCALES": weight[1].shape[-1], "PAIRS": tile_pairs, "TILE_OUT": cut.tile_out, "TILE_IN": cut.tile_in,
        "MACHINE": x.device.type == "cuda" and x.element_size() == 2, "num_warps": cut.num_warps,
        "num_stages": cut.num_stages, **pdl_options(pdl),
    }  # fmt: skip
