"""Self-attention: projections, head norms, rotary embedding and the KV store around the attention kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.ops import QKNormRope
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.config import AttentionConfig
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import NormOverHeads, RMSNorm, SublayerNorms
from minisgl_backend.layers.residual import MicroBatches, join
from minisgl_backend.layers.rotary import head_order, query_growth
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.parts import WeightPart


class AttentionBlock(WeightedLayer, ABC):
    """Attention sublayer: projection of the hidden states, `heads`, and output projection."""

    qkv_proj: ColumnParallelLinear
    o_proj: RowParallelLinear
    _tp: TensorParallel

    @abstractmethod
    def bind(self, spec: AttentionSpec, pool: KVPool) -> None:
        """Binds attention to this pool."""

    def derive_weights(self) -> None:
        """To be called when all weights are loaded."""

    @abstractmethod
    def heads(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Everything between qkv_proj and o_proj: norms, rotation, the store into the KV pool, and attention.

        qkv: output of qkv_proj, [num_tokens, local outputs], may be overwritten -> the input of o_proj, [num_tokens,
        local num_q_heads * v_head_dim].
        """

    @abstractmethod
    def store(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Only stores these tokens in the KV pool: as `heads` without queries; slots int [num_tokens]."""

    def forward(
        self,
        micro_batches: MicroBatches,
        norms: SublayerNorms,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
        *,
        defers_o_proj: Callable[[int], bool],
    ) -> MicroBatches:
        """The residual stream plus attention(norm(residual)), of all micro-batches together; positions int
        [num_tokens].

        `logits_indices`, int [num_logits]: only these tokens are returned; keys and values are stored for all.
        `defers_o_proj`: whether the next sublayer runs o_proj, at this token count.
        """
        if len(micro_batches) == 1:
            residual, qkv = self.qkv_proj(micro_batches[0], norms.before)
            settled: MicroBatches = (residual,)
        else:  # attention takes one tensor, which has the rows of all micro-batches
            qkv = self.qkv_proj.empty_outputs(len(positions))
            rows = qkv.split([one.num_tokens for one in micro_batches])
            pairs = zip(micro_batches, rows, strict=True)
            settled = tuple(self.qkv_proj.into(one, norms.before, out) for one, out in pairs)
        attended = self.heads(qkv, positions, ctx)
        if logits_indices is not None:
            attended, settled = attended[logits_indices], (join(settled).at(logits_indices),)
        if defers_o_proj(len(attended)):
            return (join(settled).deferring(attended, self.o_proj.method),)
        if self._tp.size == 1:
            return (self.o_proj(settled[0], attended, norms),)
        sizes = self._tp.micro_batches(len(attended))
        all_reduce = self._tp.all_reduce_for(len(attended), captured=ctx.captured)
        if len(sizes) != len(settled):
            settled = join(settled).split(sizes)
        pairs = zip(settled, attended.split(sizes), strict=True)
        return tuple(self.o_proj(one.reduced_by(all_reduce), x, norms) for one, x in pairs)


class SelfAttention(AttentionBlock):
    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        layer_index: int,
        cos_sin: torch.Tensor,
        layer_context: LayerContext,
        *,
        input_size: int | None = None,
    ) -> None:
        """cos_sin: of `config.rope`, float32 [max_seq_len, head_dim]; shared with other layers. input_size: of the
        input of qkv_proj; None: hidden_size."""
        super().__init__()
        self._layer_index = layer_index
        self._layer: AttentionLayer  # see `bind`
        self._config = config
        self._ops = layer_context.ops
        self._tp = tp = layer_context.tp
        self._sinks_name = layer_context.name("sinks")
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = self._outputs(config)
        # With more ranks than KV heads, several ranks have the same head.
        kv_parts = min(config.num_kv_heads, tp.size)
        order = head_order(config.rope, config.head_dim)
        self.qkv_proj = ColumnParallelLinear(
            input_size or hidden_size,
            outputs,
            config.qkv_bias,
            layer_context,
            parts={"k_proj": kv_parts, "v_proj": kv_parts},
            row_orders={"q_proj": order, "k_proj": order},
        )
        self.o_proj = RowParallelLinear(q_size, hidden_size, "o_proj", config.output_bias, layer_context)
        self._sizes = (q_size // tp.size, kv_size // kv_parts)  # of this rank's queries and keys
        norm, over_heads = config.qk_norm, config.qk_norm_over_heads
        self.q_norm: RMSNorm | NormOverHeads | None = None
        self.k_norm: RMSNorm | NormOverHeads | None = None
        if norm is not None and over_heads:
            self.q_norm = NormOverHeads(q_size, tp.size, norm, "q_norm", layer_context, order)
            self.k_norm = NormOverHeads(kv_size, kv_parts, norm, "k_norm", layer_context, order)
        elif norm is not None and norm.weight:
            self.q_norm = RMSNorm(config.head_dim, norm, "q_norm", layer_context, order)
            self.k_norm = RMSNorm(config.head_dim, norm, "k_norm", layer_context, order)
        behind = norm is not None and config.qk_norm_behind_rope
        assert not (behind and over_heads), "no family asks for both"
        # The rotation does not change a head's RMS, so only the norm's weights come after it. Scores are dot products
        # of queries and keys, so the keys' weights can be multiplied into the queries.
        bare = norm is not None and not norm.weight
        one = None
        if behind or bare:
            one = torch.ones(config.head_dim, dtype=layer_context.dtype, device=layer_context.device)
        self._query_factors = None if bare else one  # [head_dim], see `derive_weights`
        self._growth = query_growth(config.query_growth, len(cos_sin), layer_context.device)
        self._adjusts_queries = self._query_factors is not None or self._growth is not None
        # Split over the ranks like the query heads.
        sinks = layer_context.parameter(config.num_q_heads // tp.size, dtype=torch.float32) if config.sinks else None
        self.sinks = sinks
        self._rotation = QKNormRope(  # weights are loaded in place
            q_norm=one if one is not None else self.q_norm.weight if isinstance(self.q_norm, RMSNorm) else None,
            k_norm=one if one is not None else self.k_norm.weight if isinstance(self.k_norm, RMSNorm) else None,
            cos_sin=cos_sin,
            eps=norm.eps if norm is not None else 0.0,
        )

    def _outputs(self, config: AttentionConfig) -> dict[str, int]:
        """Of `qkv_proj`, by name."""
        kv_size = config.num_kv_heads * config.head_dim
        return {"q_proj": config.num_q_heads * config.head_dim, "k_proj": kv_size, "v_proj": kv_size}

    def bind(self, spec: AttentionSpec, pool: KVPool) -> None:
        sinks = None if self.sinks is None else self.sinks.data
        self._layer = spec.layer(self._layer_index, pool.layer(self._layer_index), sinks)

    def heads(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        layer, r = self._layer, self._rotation
        if isinstance(self.q_norm, NormOverHeads) and isinstance(self.k_norm, NormOverHeads):
            q_size, k_size = self._sizes
            self.q_norm.apply_(qkv[:, :q_size])
            self.k_norm.apply_(qkv[:, q_size : q_size + k_size])
        if not self._adjusts_queries and ctx.fuses_rope(layer):
            return ctx.attend_with_rope(layer, qkv, r).flatten(1)
        q = self._ops.rope_store(qkv, r, positions, ctx.slots[layer.cache_group], layer.kv, layer.num_q_heads)
        return ctx.attend(layer, self._adjusted(q, positions)).flatten(1)

    def _adjusted(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q [num_tokens, local num_q_heads, head_dim], rotated, which may be overwritten."""
        if self._query_factors is not None:
            q = q.mul_(self._query_factors)
        return q if self._growth is None else q.mul_(self._growth[positions].view(-1, 1, 1))

    def derive_weights(self) -> None:
        if self._query_factors is not None:
            assert isinstance(self.q_norm, RMSNorm)
            assert isinstance(self.k_norm, RMSNorm)
            self._query_factors = self.q_norm.weight.float() * self.k_norm.weight.float()

    def store(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        if isinstance(self.k_norm, NormOverHeads):
            q_size, k_size = self._sizes
            self.k_norm.apply_(qkv[:, q_size : q_size + k_size])
        self._ops.rope_store(qkv, self._rotation, positions, slots, self._layer.kv, self._layer.num_q_heads)

    def weight_parts(self) -> list[WeightPart]:
        if self.sinks is None:
            return []
        start = self._tp.rank * len(self.sinks)
        return [WeightPart(name=self._sinks_name, shape=(self._config.num_q_heads,), target=self.sinks, start=start)]
