"""Experts in MXFP4 for a few tokens and for many, in the Triton language: two grouped GEMMs.

The kernels, and the layouts of their weights and inputs, are in gemm.py.

`pdl`: programmatic dependent launch, whose rules are in plain/small_rows.py.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.launch import cdiv
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked
from minisgl_backend.kernels.moe.few_plan import SLOTS, Plan
from minisgl_backend.kernels.moe.gemms import ExpertsGemm, GemmShape, MixtureShape, Pairs, by_plan, by_sorted_pairs
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels
from minisgl_backend.kernels.moe.mxfp4.gemm import few_kernel, grouped_kernel
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight
from minisgl_backend.kernels.shared_memory import LARGEST, shared_memory

_SCALES_PADDED = 16  # rows of scales are padded to a multiple of it: tiles may read beyond the row's end
MEAN_PAIRS = (12, 24, 48)  # pairs per expert: upper bounds of the ranges for which each tiling is best
LARGEST_SCALE = 128  # E8M0: 2^126 times the scale has to fit into a bfloat16


# Outputs per tile are rows of the weight. At least 4 bytes of scales per thread and step: otherwise they are not
# prefetched.
def few_shape(num_tokens: int) -> MixtureShape[GemmShape]:
    """Tiling for the plan of few_plan.py. Measured best on an H200, 4 of 32 experts of 2,880 x 2,880."""
    cut = GemmShape(64, 256, 4, 3) if num_tokens <= 8 else GemmShape(128, 128, 4, 4)
    return MixtureShape(SLOTS, cut, cut)


def grouped_shape(
    pairs: int, num_experts: int, element_size: int = 2, shared: int = LARGEST
) -> MixtureShape[GemmShape]:
    """Tiling for sorted pairs, by the pairs per expert; measured likewise. Tiles are small for numbers of four bytes,
    and not large where `shared` memory is smaller than Hopper's."""
    few, some, many = (mean * num_experts for mean in MEAN_PAIRS)
    if element_size > 2:
        tile_pairs, cut = 16, GemmShape(64, 128, 4, 2)
    elif pairs <= some:
        tile_pairs, cut = 16 if pairs <= few else 32, GemmShape(128, 128, 4, 4)
    elif pairs <= many or shared < LARGEST:
        tile_pairs, cut = 64, GemmShape(128, 128, 4, 3)
    else:
        tile_pairs, cut = 128, GemmShape(256, 128, 8, 3)
    return MixtureShape(tile_pairs, cut, cut)


def pack(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Weight:
    """A checkpoint's blocks uint8 [experts, outputs, blocks, 16] and scales uint8 [experts, outputs, blocks] -> numbers
    int16 [experts, outputs, 8 * blocks] in the order of these kernels, and scales with padded rows.

    Synchronises with the device. Raises ConfigError for scales above 2 or NaN, which the kernels cannot represent.
    """
    if int(scales.max()) > LARGEST_SCALE:
        raise ConfigError(
            f"a scale of the MXFP4 weights is 2^{int(scales.max()) - 127}; allowed on a GPU: at most "
            f"2^{LARGEST_SCALE - 127}"
        )
    experts, outputs, count, _ = blocks.shape
    words = torch.empty((experts, outputs, 8 * count), dtype=torch.int16, device=blocks.device)
    for expert in range(experts):
        numbers = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2).unflatten(-1, (4, 8))
        first, second, third, last = numbers.int().unbind(-2)
        word = _spread(first) << 6 | _spread(second) << 3 | _spread(third)
        word |= (last & 8) << 11 | (last & 4) << 11 | (last & 3) << 10
        words[expert] = word.flatten(-2)  # wraps around: the bits are what matters
    return Mxfp4Weight(words, torch.nn.functional.pad(scales, (0, -scales.shape[-1] % _SCALES_PADDED)))


def _spread(number: torch.Tensor) -> torch.Tensor:
    """Spreads a 4-bit number: its sign 9 bits above the lowest bit, the distance that they have in a bfloat16."""
    return (number & 8) << 6 | number & 7


def mixture(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Mxfp4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`, with weights of `pack`."""
    x, picked = kernels.picked(x, experts, call)
    shape = grouped_shape(picked.ids.numel(), experts.num_experts, x.element_size(), shared_memory(x.device))
    return of_picked(x, experts, picked, call.residual, shape, kernels.ops.moe_pdl(x))


def of_picked(
    x: torch.Tensor,
    experts: Experts[Mxfp4Weight],
    picked: Picked,
    residual: torch.Tensor | None,
    shape: MixtureShape[GemmShape],
    pdl: bool = False,
) -> torch.Tensor:
    """`mixture` in tiles of `shape`."""
    return by_sorted_pairs(x, experts, picked, residual, shape=shape, gemm=_gemm, pdl=pdl)


def _gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    grouped_kernel[(cdiv(gemm.weight.outputs, gemm.cut.tile_out), pairs.num_tiles)](
        gemm.x, *gemm.weight, gemm.weight.numbers if gemm.bias is None else gemm.bias, gemm.out, *pairs.tiles,
        pairs.weights, gemm.x.stride(0), gemm.out.stride(0), **_options(gemm, pairs),
    )  # fmt: skip


def mixture_of_few(
    kernels: TritonMixtureKernels, x: torch.Tensor, experts: Experts[Mxfp4Weight], call: MixtureCall
) -> torch.Tensor:
    """See `MixtureCall`; for few tokens (choose.py), with weights of `pack`."""
    return by_plan(kernels, x, experts, call, few_shape(len(x)), _few_gemm)


def _few_gemm(gemm: ExpertsGemm, pairs: Pairs) -> None:
    plan = pairs.plan
    assert isinstance(plan, Plan)
    few_kernel[(cdiv(gemm.weight.outputs, gemm.cut.tile_out), plan.max_tiles)](
        gemm.x, *gemm.weight, gemm.weight.numbers if gemm.bias is None else gemm.bias, gemm.out, plan.tiles,
        plan.weights, gemm.x.stride(0), PACKED=plan.is_packed, **_options(gemm, pairs),
    )  # fmt: skip


def _options(gemm: ExpertsGemm, pairs: Pairs) -> dict[str, Any]:
    """Launch arguments of both kernels. Two-byte dtypes use inline assembly, which Triton's interpreter does not
    support."""
    x, weight, cut = gemm.x, gemm.weight, gemm.cut
    return {
        "SIZE_OUT": weight.outputs, "SIZE_IN": weight.inputs, "SCALES": weight.scales.shape[-1],
        "PAIRS": pairs.tile_pairs, "TILE_OUT": cut.tile_out, "TILE_IN": cut.tile_in, "BIAS": gemm.bias is not None,
        "MACHINE": x.device.type == "cuda" and x.element_size() == 2, **gemm.options(pairs),
    }  # fmt: skip
