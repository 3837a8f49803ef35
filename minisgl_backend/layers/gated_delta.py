"""The gated delta rule as a layer's mixer: one projection of all inputs, the kernels, output projection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.calls import DeltaLayer
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.kv.state import StatePool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.gated_delta_config import GatedDeltaConfig
from minisgl_backend.layers.linear import RowParallelLinear, column_parallel
from minisgl_backend.layers.mixer import Mixer
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.parts import WeightPart


class GatedDelta(Mixer):
    """Its kernels are the eager piece of captured prompts. Value heads are split over ranks with the key heads that
    they read, and so are the channels of the convolution: its part of queries, of keys and of values."""

    def __init__(self, config: GatedDeltaConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        tp = layer_context.tp
        self._config, self._context, self._rank = config, layer_context, tp.rank
        self._share = share = config.state.share(tp.size)
        values = config.num_v_heads * config.v_dim
        keys = config.num_k_heads * config.k_dim
        self._channels = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}  # of the whole model
        projected = {"q": keys, "k": keys, "v": values, "z": values, "b": config.num_v_heads, "a": config.num_v_heads}
        outputs = {f"in_proj_{name}": size for name, size in projected.items()}
        self.qkv_proj = column_parallel(hidden_size, outputs, layer_context)
        self.o_proj = RowParallelLinear(values, hidden_size, "out_proj", False, layer_context)
        self.conv_weight = self._parameter(config.conv_width, share.conv_channels)  # which kernels read by channels
        self.a_log, self.dt_bias = self._parameter(share.num_v_heads), self._parameter(share.num_v_heads)
        self.norm_weight = self._parameter(config.v_dim)
        self.shape_out = (share.num_v_heads * config.v_dim,)
        self._kernels = recurrent_kernels(DeviceFacts.of(layer_context.device))
        self._layer: DeltaLayer  # see `bind_states`

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        return self._context.parameter(*shape, dtype=torch.float32)

    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        """Nothing: it has no part of the pages."""

    def bind_states(self, states: StatePool, layers: Iterator[int]) -> None:
        self._layer = DeltaLayer(
            config=self._share,
            conv_weight=self.conv_weight,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            norm_eps=self._config.norm.eps,
            state=states.layer(next(layers)),
            page_size=states.page_size,
            beta_scale=self._config.beta_scale,
        )

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        return ctx.attention.run(self, projected, ctx.slots)

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: Any, out: torch.Tensor) -> None:
        """See `EagerPiece`."""
        kernels, layer, first = self._kernels, self._layer, plan.num_prefill_tokens
        if plan.chunks is not None:
            inputs = x[:first]
            mixed = kernels.delta_chunk(kernels.conv_prefill(inputs, layer, plan.chunks), inputs, layer, plan.chunks)
            kernels.gated_norm(mixed, inputs, layer, out[:first])
        if plan.window is not None:
            kernels.delta_window(x[first:], layer, plan.window, out[first:])

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        raise NotImplementedError("a layer that drafts keeps its tokens in pages")

    def weight_parts(self) -> list[WeightPart]:
        context, config = self._context, self._config
        parts, first, conv_weight = list[WeightPart](), 0, self.conv_weight.t()[:, None]
        for name, size in self._channels.items():
            local = size // context.tp.size
            target, full = conv_weight[first : first + local], f"{context.name(name)}.weight"
            shape = (size, 1, config.conv_width)
            parts.append(WeightPart(name=full, shape=shape, target=target, start=self._rank * local))
            first += local
        for name, target in (("A_log", self.a_log), ("dt_bias", self.dt_bias)):
            start = self._rank * len(target)
            part = WeightPart(name=context.name(name), shape=(config.num_v_heads,), target=target, start=start)
            parts.append(part)
        norm = WeightPart(name=f"{context.name('norm')}.weight", shape=(config.v_dim,), target=self.norm_weight)
        return [*parts, norm]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        super().fill_with_noise(generator)
        heads: Any = torch.arange(len(self.a_log), device=self.a_log.device)
        self.a_log.data.copy_(-2 - 3 * heads / len(heads))  # decays of 0.6 to 0.99 a token
        self.dt_bias.data.fill_(1.0)
