"""The gated short convolution: a mixer whose state is a part of each page (`kv.rings`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec, TokenPages
from minisgl_backend.kernels.recurrent.short_conv import ShortConvCall, choose_short_conv
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.rings import RingLayout
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer import Mixer
from minisgl_backend.layers.mixer_config import MixerConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.short_conv_config import ShortConvConfig
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.parts import WeightPart


class ShortConv(Mixer):
    """Its own eager piece: what a token reads of earlier ones hangs on the step's rows."""

    has_page_state = True

    def __init__(self, config: ShortConvConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        channels, tp = config.channels, layer_context.tp
        self._config, self._tp = config, tp
        self.shape_out = (channels // tp.size,)
        self.qkv_proj = ColumnParallelLinear(
            hidden_size, dict.fromkeys(("b_proj", "c_proj", "x_proj"), channels), config.bias, layer_context
        )
        self.o_proj = RowParallelLinear(channels, hidden_size, "out_proj", config.bias, layer_context)
        self._name = layer_context.name("conv")
        self.weight = layer_context.parameter(*self.shape_out, config.width)
        self.bias = layer_context.parameter(*self.shape_out) if config.bias else None
        self._kernel = choose_short_conv(layer_context.ops)
        self._page_size: int  # see `bind`
        self._ring: torch.Tensor

    @classmethod
    def page_state(cls, config: MixerConfig, tp_size: int, dtype: torch.dtype, max_drafts: int) -> RingLayout:
        assert isinstance(config, ShortConvConfig), "it names this class"
        return RingLayout(length=config.ring_length(max_drafts), size=config.channels // tp_size, dtype=dtype)

    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        self._page_size, self._ring = spec.page_size, pool.ring(next(layers))

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        return ctx.attention.run(self, projected, ctx.slots)

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: Any, out: torch.Tensor) -> None:
        tokens: TokenPages = plan.tokens  # which a spec with page states has
        bias = None if self.bias is None else self.bias.data
        self._kernel(
            ShortConvCall(
                x, self.weight.data, bias, tokens.rows, tokens.ends, tokens.page_table, self._page_size, self._ring, out
            )
        )

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        raise NotImplementedError("no head that drafts has such a layer")

    def weight_parts(self) -> list[WeightPart]:
        (size,), width = self.shape_out, self._config.width
        start, channels = self._tp.rank * size, self._config.channels
        weight = WeightPart(
            name=f"{self._name}.weight",
            shape=(channels, 1, width),
            target=self.weight.unsqueeze(1),
            start=start,
        )
        if self.bias is None:
            return [weight]
        return [weight, WeightPart(name=f"{self._name}.bias", shape=(channels,), target=self.bias, start=start)]
