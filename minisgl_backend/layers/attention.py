"""Self-attention: projections, head norms, rotary embedding and the KV store around the attention kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec, QKNormRope
from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.config import AttentionConfig
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Lanes, Residual, joined
from minisgl_backend.layers.rotary import head_order
from minisgl_backend.layers.weights import LayerContext


class SelfAttention(nn.Module):
    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        layer_index: int,
        cos_sin: torch.Tensor,
        layer_context: LayerContext,
    ) -> None:
        """cos_sin: of `config.rope`, float32 [max_seq_len, head_dim]; shared with other layers."""
        super().__init__()
        self._layer_index = layer_index
        self._layer: AttentionLayer  # see `bind`
        self._ops = layer_context.ops
        self._tp = tp = layer_context.tp
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        # Of more ranks than KV heads, several have the same one.
        parts = dict.fromkeys(("k_proj", "v_proj"), min(config.num_kv_heads, tp.size))
        self.qkv_proj = ColumnParallelLinear(
            hidden_size,
            outputs,
            config.qkv_bias,
            layer_context,
            parts=parts,
            row_orders=dict.fromkeys(("q_proj", "k_proj"), head_order(config.rope, config.head_dim)),
        )
        self.o_proj = RowParallelLinear(q_size, hidden_size, "o_proj", config.output_bias, layer_context)
        norm, head_dim = config.qk_norm, config.head_dim
        self.q_norm = RMSNorm(head_dim, norm.eps, "q_norm", layer_context) if norm is not None else None
        self.k_norm = RMSNorm(head_dim, norm.eps, "k_norm", layer_context) if norm is not None else None
        self._rotation = QKNormRope(  # weights are loaded in place
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            cos_sin=cos_sin,
            eps=norm.eps if norm is not None else 0.0,
        )

    def bind(self, spec: AttentionSpec, pool: KVPool) -> None:
        """From now on attention reads and writes this pool."""
        self._layer = spec.layer(self._layer_index, pool.layer(self._layer_index))

    def forward(
        self,
        lanes: Lanes,
        norm: RMSNorm,
        positions: torch.Tensor,
        ctx: ForwardContext,
        logits_indices: torch.Tensor | None = None,
        *,
        leaves_product: Callable[[int], bool],
    ) -> Lanes:
        """hidden + attention(norm(hidden)), both [num_tokens, hidden_size] in all lanes; positions int [num_tokens].

        `logits_indices`, int [num_logits]: only these tokens are returned; keys and values are stored for all.
        `leaves_product`: whether the last product, of so many lines, is left to what comes next.
        """
        hidden: tuple[torch.Tensor, ...]
        if len(lanes) == 1:
            first, qkv = self.qkv_proj(lanes[0], norm)
            hidden = (first,)
        else:  # attention wants one tensor, of which each lane has its lines
            qkv = lanes[0].hidden.new_empty(len(positions), len(self.qkv_proj.weight))
            lines = qkv.split([len(lane.hidden) for lane in lanes])
            hidden = tuple(self.qkv_proj.into(lane, norm, out) for lane, out in zip(lanes, lines, strict=True))
        attended = self._attend(qkv, positions, ctx).flatten(1)
        if logits_indices is not None:
            attended, hidden = attended[logits_indices], (joined(hidden)[logits_indices],)
        if leaves_product(len(attended)):
            return (Residual(joined(hidden), product=(attended, self.o_proj.weight)),)
        sizes, way = self._tp.lanes(len(attended)), self._tp.sum_way(len(attended), captured=ctx.captured)
        if len(sizes) != len(hidden):
            hidden = joined(hidden).split(sizes)
        parts = zip(attended.split(sizes), hidden, strict=True)
        return tuple(self.o_proj(part, lane, way) for part, lane in parts)

    def _attend(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Norm and rotation of each head, the store of keys and values, and attention.

        qkv [num_tokens, local outputs], which may be overwritten -> [num_tokens, local num_q_heads, head_dim].
        """
        layer, r = self._layer, self._rotation
        if ctx.fuses_rope(layer):
            return ctx.attend_with_rope(layer, qkv, r)
        kv = layer.kv
        q = self._ops.rope_store(
            qkv, r.q_norm, r.k_norm, r.cos_sin, positions, ctx.slots, kv.k, kv.v, layer.num_q_heads, r.eps, kv.scales
        )
        return ctx.attend(layer, q)
