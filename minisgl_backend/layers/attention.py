"""Self-attention: products, norms and rotation around the attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from minisgl_backend.attention.base import QKNormRope
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.linear import ColumnParallelLinear, RowParallelLinear
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.residual import Lanes, Residual, joined
from minisgl_backend.layers.weights import LayerContext


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of the whole model's attention, before it is split over ranks."""

    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of q_norm and k_norm
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool  # RMSNorm of each query and key head


class SelfAttention(nn.Module):
    def __init__(self, shape: AttentionShape, layer_index: int, cos_sin: torch.Tensor, placement: LayerContext) -> None:
        super().__init__()
        self._layer_index = layer_index
        self._ops = placement.ops
        self._tp = placement.tp
        q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        # Of more ranks than KV heads, several have the same one.
        parts = dict.fromkeys(("k_proj", "v_proj"), min(shape.num_kv_heads, placement.tp.size))
        self.qkv_proj = ColumnParallelLinear(shape.hidden_size, outputs, shape.qkv_bias, placement, parts=parts)
        self.o_proj = RowParallelLinear(q_size, shape.hidden_size, "o_proj", shape.output_bias, placement)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps, "q_norm", placement) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.eps, "k_norm", placement) if shape.qk_norm else None
        self._rotation = QKNormRope(  # weights are loaded in place; the table is shared with other layers
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            cos_sin=cos_sin,
            eps=shape.eps,
        )

    def forward(
        self,
        lanes: Lanes,
        norm: RMSNorm,
        positions: torch.Tensor,
        ctx: ForwardContext,
        wanted: torch.Tensor | None = None,
        *,
        leaves_product: Callable[[int], bool],
    ) -> Lanes:
        """hidden + attention(norm(hidden)), both [num_tokens, hidden_size] in all lanes; positions int [num_tokens].

        `wanted`, int [num_wanted]: only these lines are returned; keys and values are stored for all tokens.
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
        attended = ctx.attend(self._layer_index, qkv, positions, self._rotation, self._ops).flatten(1)
        if wanted is not None:
            attended, hidden = attended[wanted], (joined(hidden)[wanted],)
        if leaves_product(len(attended)):
            return (Residual(joined(hidden), product=(attended, self.o_proj.weight)),)
        sizes, way = self._tp.lanes(len(attended)), self._tp.sum_way(len(attended), captured=ctx.captured)
        if len(sizes) != len(hidden):
            hidden = joined(hidden).split(sizes)
        parts = zip(attended.split(sizes), hidden, strict=True)
        return tuple(self.o_proj(part, lane, way) for part, lane in parts)
