"""What mixtures of experts by grouped GEMMs have in common on the host, whatever the format of their weights: which
pairs of (token, expert) each tile holds, the GEMM with gate_up, the GEMM with down, and each token's sum.

A format brings its tilings, and how it launches one GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from minisgl_backend.kernels.elementwise import combine
from minisgl_backend.kernels.launch import pdl_options
from minisgl_backend.kernels.moe.align import Tiles, align
from minisgl_backend.kernels.moe.call import Experts, MixtureCall, Picked, Weight
from minisgl_backend.kernels.moe.few_plan import SLOTS, Plan, plan_few
from minisgl_backend.kernels.moe.gpu import TritonMixtureKernels


class GemmShape(NamedTuple):
    """Tiling of one GEMM: outputs per tile, inputs per step, warps, stages. The outputs of that with gate_up are
    counted after gating, where a format does not say otherwise."""

    tile_out: int
    tile_in: int
    num_warps: int
    num_stages: int


Cut = TypeVar("Cut")


@dataclass(frozen=True)
class MixtureShape(Generic[Cut]):
    """Pairs per tile, and the tilings of the two GEMMs: a `GemmShape`, or what a format has instead."""

    tile_pairs: int
    gate_up: Cut
    down: Cut


class Pairs(NamedTuple):
    """The pairs of (token, expert) of a step, sorted by expert or as few tokens' plan has them."""

    plan: Tiles | Plan
    weights: torch.Tensor  # float32, of each pair
    experts_per_token: int
    tile_pairs: int
    pdl: bool  # programmatic dependent launch, whose rules are in plain/small_rows.py

    @property
    def num_tiles(self) -> int:
        return self.plan.expert.numel() if isinstance(self.plan, Tiles) else self.plan.max_tiles

    @property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of sorted pairs: their order, and the expert, the first and the end of each tile."""
        assert isinstance(self.plan, Tiles)
        return self.plan.order, self.plan.expert, self.plan.first, self.plan.end


class ExpertsGemm(NamedTuple):
    """One of the two GEMMs: that with gate_up reads x by token, that with down by pair."""

    x: torch.Tensor
    weight: Any  # the format's
    bias: torch.Tensor | None
    out: torch.Tensor  # [pairs, outputs]
    cut: Any  # the format's tiling
    activation: str | None  # None: it is that with down, whose results are multiplied by the pairs' weights

    @property
    def is_gated(self) -> bool:
        return self.activation is not None

    def options(self, pairs: Pairs) -> dict[str, Any]:
        """Launch arguments that all kernels have."""
        return {
            "K": pairs.experts_per_token, "GATED": self.is_gated, "ACTIVATION": self.activation,
            "num_warps": self.cut.num_warps, "num_stages": self.cut.num_stages, **pdl_options(pairs.pdl),
        }  # fmt: skip


Launch: TypeAlias = Callable[[ExpertsGemm, Pairs], None]


def outputs_of_pairs(
    x: torch.Tensor, experts: Experts[Weight], pairs: Pairs, shape: MixtureShape[Any], gemm: Launch
) -> torch.Tensor:
    """Both GEMMs: [pairs, hidden_size]."""
    count = pairs.weights.numel()
    activated = x.new_empty((count, experts.intermediate_size))
    out = x.new_empty((count, experts.hidden_size))
    gemm(ExpertsGemm(x, experts.gate_up, experts.gate_up_bias, activated, shape.gate_up, experts.activation), pairs)
    gemm(ExpertsGemm(activated, experts.down, experts.down_bias, out, shape.down, None), pairs)
    return out


def by_sorted_pairs(
    x: torch.Tensor,
    experts: Experts[Weight],
    picked: Picked,
    residual: torch.Tensor | None,
    *,
    shape: MixtureShape[Any],
    gemm: Launch,
    pdl: bool,
) -> torch.Tensor:
    """The mixture of picked experts, of any number of tokens; nothing waits for the device."""
    ids, weights = picked
    if ids.numel() == 0:
        return torch.empty_like(x) if residual is None else residual.clone()
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = align(ids.contiguous(), experts.num_experts, shape.tile_pairs, pdl)
    pairs = Pairs(tiles, weights.contiguous(), ids.shape[1], shape.tile_pairs, pdl)
    return combine(outputs_of_pairs(x, experts, pairs, shape, gemm), ids.shape[1], residual, pdl)


def by_plan(
    kernels: TritonMixtureKernels,
    x: torch.Tensor,
    experts: Experts[Weight],
    call: MixtureCall,
    shape: MixtureShape[Any],
    gemm: Launch,
) -> torch.Tensor:
    """The mixture of a few tokens (choose.py), whose router plans the tiles."""
    pdl, k = kernels.ops.pdl(x), experts.experts_per_token
    normed, plan = plan_few(x, call, k, experts.renormalize, kernels.plain.workspace, pdl)
    assert isinstance(normed, torch.Tensor), "not asked for in FP8"
    pairs = Pairs(plan, plan.weights, k, SLOTS, pdl)
    return combine(outputs_of_pairs(normed, experts, pairs, shape, gemm), k, call.residual, pdl)
