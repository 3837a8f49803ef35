"""A toy mixer that is not attention: a token sees those before it in its page, the older the less. It runs as an eager
piece between captured ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import PairPlan
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer import Mixer
from minisgl_backend.layers.mixer_config import MixerConfig, RopeConfig, check_divides
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.parts import WeightPart


@dataclass(frozen=True, kw_only=True)
class PageMixerConfig(MixerConfig):
    module: ClassVar[str] = "tests.toys.page_mixer:PageMixer"
    name: ClassVar[str] = "page_mixer"
    rope: ClassVar[RopeConfig | None] = None

    size: int  # numbers kept of a token
    decay: float = 0.5  # per token

    def num_weights(self, hidden_size: int) -> int:
        return 2 * self.size * hidden_size

    def check_tp(self, size: int) -> None:
        check_divides(size, "page_mixer_size", self.size)


class PageMixer(Mixer):
    """Its own eager piece."""

    def __init__(self, config: PageMixerConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._decay, self.shape_out = config.decay, (config.size // layer_context.tp.size,)
        self.qkv_proj = ColumnParallelLinear(hidden_size, {"in_proj": config.size}, False, layer_context)
        self.o_proj = RowParallelLinear(config.size, hidden_size, "out_proj", False, layer_context)
        self.num_runs = 0

    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        self._page = torch.arange(spec.page_size, device=spec.device)
        num_slots = (pool.num_pages + 1) * spec.page_size
        self._kept = torch.zeros(num_slots, *self.shape_out, dtype=spec.dtype, device=spec.device)

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        return ctx.attention.run(self, projected, ctx.slots)

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: PairPlan, out: torch.Tensor) -> None:
        self.num_runs += 1
        own = slots[0].long()
        self._kept[own] = x
        offset = own % len(self._page)
        age = offset[:, None] - self._page
        weights = torch.where(age >= 0, self._decay ** age.clamp(min=0).to(x.dtype), 0)
        out.copy_(torch.einsum("tp,tps->ts", weights, self._kept[(own - offset)[:, None] + self._page]))

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        self._kept[slots.long()] = projected

    def weight_parts(self) -> list[WeightPart]:
        return []
