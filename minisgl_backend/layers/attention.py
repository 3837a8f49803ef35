"""Self-attention: projections, head norms, rotary embedding and the KV store around the attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.ops import QKNormRope, TokenPlaces
from minisgl_backend.kv.layout import MHALayout
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer import Mixer
from minisgl_backend.layers.mixer_config import AttentionConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.rotary import head_order
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.parts import WeightPart


class SelfAttention(Mixer):
    """Variants are subclasses in `layers.attention_variants`."""

    q_norm: nn.Module  # where it has norms
    k_norm: nn.Module

    def __init__(
        self, config: Any, hidden_size: int, layer_context: LayerContext, *, input_size: int | None = None
    ) -> None:
        """config: an `AttentionConfig`, of a subclass the one that names it. input_size: of the input of qkv_proj;
        None: hidden_size."""
        super().__init__()
        self._layer: AttentionLayer  # see `bind`
        self._config: AttentionConfig = config
        self._ops = layer_context.ops
        self._tp = tp = layer_context.tp
        self._sinks_name = layer_context.name("sinks")
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # With more ranks than KV heads, several ranks have the same head.
        self._kv_parts = kv_parts = min(config.num_kv_heads, tp.size)
        self._order = order = head_order(config.rope, config.head_dim)
        self.qkv_proj = ColumnParallelLinear(
            input_size or hidden_size,
            self._outputs({"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}),
            config.qkv_bias,
            layer_context,
            parts={"k_proj": kv_parts, "v_proj": kv_parts},
            row_orders={"q_proj": order, "k_proj": order},
        )
        self.o_proj = RowParallelLinear(q_size, hidden_size, "o_proj", config.output_bias, layer_context)
        self._sizes = (q_size // tp.size, kv_size // kv_parts)  # of this rank's queries and keys
        # Split over the ranks like the query heads.
        sinks = layer_context.parameter(config.num_q_heads // tp.size, dtype=torch.float32) if config.sinks else None
        self.sinks = sinks
        self._rope = layer_context.rope_table(config.rope, config.rope_head_dim)
        q_norm, k_norm = self._head_norms(layer_context)
        eps = 0.0 if config.qk_norm is None else config.qk_norm.eps
        self._rotation = QKNormRope(q_norm=q_norm, k_norm=k_norm, cos_sin=self._rope.cos_sin, eps=eps)

    def _outputs(self, outputs: dict[str, int]) -> dict[str, int]:
        """Of `qkv_proj`, by name; a variant may have fewer."""
        return outputs

    def _head_norms(self, layer_context: LayerContext) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Weights of the norms of each query and each key head before the rotation, which are loaded in place."""
        config = self._config
        if config.qk_norm is None:
            return None, None
        if not config.qk_norm.weight:
            one = torch.ones(config.head_dim, dtype=layer_context.dtype, device=layer_context.device)
            return one, one
        q_norm, k_norm = (
            RMSNorm(config.head_dim, config.qk_norm, name, layer_context, self._order) for name in ("q_norm", "k_norm")
        )
        self.q_norm, self.k_norm = q_norm, k_norm
        return q_norm.weight, k_norm.weight

    @classmethod
    def cache(cls, config: Any, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup:
        # A window or a chunk that no sequence outgrows is none: its layers join those that see everything.
        window, chunk = (
            size if size is not None and size < max_seq_len else None for size in (config.window, config.chunk)
        )
        num_kv_heads = max(1, config.num_kv_heads // tp_size)
        return LayerGroup(
            num_q_heads=config.num_q_heads // tp_size,
            kv=MHALayout(num_kv_heads=num_kv_heads, head_dim=config.head_dim, dtype=dtype),
            window=window,
            chunk=chunk,
            scale=config.scale,
            soft_cap=config.soft_cap,
            sinks=config.sinks,
        )

    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        sinks, index = None if self.sinks is None else self.sinks.data, next(layers)
        self._layer = spec.layer(index, pool.layer(index), sinks)

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        layer, by = self._layer, tokens.rotation
        # The kernel that rotates itself knows rows and true positions alone.
        if (by is None or by.shifts is not None) and ctx.attention.fuses_rope(layer):
            rotation = self._rotation if by is None else replace(self._rotation, shifts=by.shifts)
            return ctx.attention.attend_with_rope(layer, projected, rotation).flatten(1)
        return ctx.attention.attend(layer, self._rotated(projected, tokens, ctx.slots[layer.cache_group])).flatten(1)

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        self._rotated(projected, tokens, slots)

    def _rotated(self, qkv: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> torch.Tensor:
        """Queries, rotated; keys and values are stored."""
        layer, rotation, positions = self._layer, self._rotation, tokens.positions
        if tokens.rotation is not None:
            cos_sin, positions = tokens.rotation.by(self._rope)
            rotation = replace(rotation, cos_sin=cos_sin)
        return self._ops.rope_store(qkv, rotation, TokenPlaces(positions, slots), layer.kv, layer.num_q_heads)

    def weight_parts(self) -> list[WeightPart]:
        if self.sinks is None:
            return []
        start = self._tp.rank * len(self.sinks)
        return [WeightPart(name=self._sinks_name, shape=(self._config.num_q_heads,), target=self.sinks, start=start)]
