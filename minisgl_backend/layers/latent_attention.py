"""Multi-head latent attention (MLA; DeepSeek-AI, 2024: DeepSeek-V2): projections, norms, rotation and store around the
attention kernels, which use latents or the keys and values expanded from them (`attention.latent`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from minisgl_backend.attention.base import AttentionSpec, LayerGroup
from minisgl_backend.attention.layer import AttentionLayer, LatentHeads, LatentProjection
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.ops import LatentNormRope, TokenPlaces
from minisgl_backend.kv.latent import LatentLayout
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.mixer import Mixer
from minisgl_backend.layers.mixer_config import LatentAttentionConfig
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.rotary import head_order
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart


class LatentAttention(Mixer):
    """Heads are split over the ranks; latents are computed and cached on all of them.

    `qkv_proj` computes the queries (or their latent), the cached latent and its rotated key.
    """

    def __init__(self, config: LatentAttentionConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__()
        self._layer: AttentionLayer  # see `bind`
        self._config, self._rope = config, layer_context.rope_table(config.rope, config.rope_head_dim)
        self._ops = layer_context.ops
        self._tp = tp = layer_context.tp
        self._num_heads = config.num_q_heads // tp.size
        kept, rank = config.head_dim, config.kv_lora_rank
        qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        queries = {"q_proj": config.num_q_heads * qk_dim}
        order = head_order(config.rope, config.qk_rope_head_dim)
        q_order = _behind(config.qk_nope_head_dim, order)
        latents = {"kv_a_proj_with_mqa": kept}
        if config.q_lora_rank is not None:
            latents = {"q_a_proj": config.q_lora_rank, **latents}
        self.qkv_proj = ColumnParallelLinear(
            hidden_size,
            latents if config.q_lora_rank is not None else {**queries, **latents},
            config.bias,
            layer_context,
            parts=dict.fromkeys(latents, 1),
            row_orders={"q_proj": q_order, "kv_a_proj_with_mqa": _behind(rank, order)},
        )
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if config.q_lora_rank is not None:
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.norm, "q_a_layernorm", layer_context)
            self.q_b_proj = ColumnParallelLinear(
                config.q_lora_rank,
                {"q_b_proj": config.num_q_heads * qk_dim},
                False,
                layer_context,
                row_orders={"q_b_proj": q_order},
            )
        self.kv_a_layernorm = RMSNorm(rank, config.norm, "kv_a_layernorm", layer_context)
        norm = self.kv_a_layernorm
        self._rotation = LatentNormRope(norm=norm.weight, cos_sin=self._rope.cos_sin, eps=norm.eps)
        self.kv_b_proj = layer_context.methods.linear_as_numbers(_kv_b_spec(config, layer_context))
        self._dtype, self._kernels = layer_context.dtype, layer_context.methods.kernels.plain
        v_size = config.num_q_heads * config.v_head_dim
        self.o_proj = RowParallelLinear(v_size, hidden_size, "o_proj", config.bias, layer_context)

    @classmethod
    def cache(cls, config: Any, tp_size: int, dtype: torch.dtype, max_seq_len: int) -> LayerGroup:
        heads = LatentHeads(
            rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
        )
        return LayerGroup(
            num_q_heads=config.num_q_heads // tp_size,
            kv=LatentLayout(rank=heads.rank, rope_dim=heads.rope_dim, dtype=dtype),
            scale=config.scale,
            latent=heads,
        )

    def bind(self, spec: AttentionSpec, pool: KVPool, layers: Iterator[int]) -> None:
        weight = self.kv_b_proj.dequantized().to(self._dtype)
        projection = LatentProjection(
            weight=weight.view(self._num_heads, -1, weight.shape[1]),
            v_dim=self._config.v_head_dim,
            expand_into=lambda latents, out: self._kernels.linear(latents, weight, GemmCall(out=out)),
        )
        index = next(layers)
        self._layer = spec.layer(index, pool.layer(index), latent=projection)

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        queries, kept = projected[:, : -self._config.head_dim], projected[:, -self._config.head_dim :]
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            queries = self.q_b_proj.of(queries, norm=self.q_a_layernorm, slots=tokens.by_row)
        q = self._rotated(queries.unflatten(1, (self._num_heads, -1)), kept, tokens, ctx.slots[self._layer.cache_group])
        return ctx.attention.attend(self._layer, q).flatten(1)

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        config = self._config
        no_queries = projected.new_empty(len(projected), 0, config.qk_nope_head_dim + config.qk_rope_head_dim)
        self._rotated(no_queries, projected[:, -config.head_dim :], tokens, slots)

    def _rotated(self, q: torch.Tensor, kept: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> torch.Tensor:
        """Queries, rotated; latents and keys are stored."""
        rotation, positions = self._rotation, tokens.positions
        if tokens.rotation is not None:
            cos_sin, positions = tokens.rotation.by(self._rope)
            rotation = replace(rotation, cos_sin=cos_sin)
        return self._ops.latent_store(q, kept, rotation, TokenPlaces(positions, slots), self._layer.kv)

    def weight_parts(self) -> list[WeightPart]:
        return []


def _kv_b_spec(config: LatentAttentionConfig, layer_context: LayerContext) -> LinearSpec:
    """kv_b_proj: for each head the rows of the key that are not rotated, then those of the value."""
    tp, size = layer_context.tp, config.num_q_heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = LinearOutput(
        name=layer_context.name("kv_b_proj"), size=size, start=tp.rank * size // tp.size, local=size // tp.size
    )
    return LinearSpec(outputs=(output,), input_size=config.kv_lora_rank, local_inputs=config.kv_lora_rank)


def _behind(size: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """A row order that keeps the first `size` rows, followed by `order`."""
    return None if order is None else (*range(size), *(size + row for row in order))
