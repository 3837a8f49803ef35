"""Variants of self-attention; each is what its config in `layers.mixer_config` says."""

from __future__ import annotations

from abc import abstractmethod

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.mixer_config import (
    NormOverHeadsAttentionConfig,
    TemperatureTunedAttentionConfig,
    ValueNormAttentionConfig,
)
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.norm import NormOverHeads, RMSNorm
from minisgl_backend.layers.rotary import query_temperatures
from minisgl_backend.layers.weights import LayerContext


class _PreparedAttention(SelfAttention):
    """Something happens to queries, keys or values before they are rotated and stored."""

    @abstractmethod
    def _prepared(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv_proj's outputs, which may be overwritten, -> qkv as `SelfAttention` takes it."""

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        return super().mix(self._prepared(projected), tokens, ctx)

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        super().store(self._prepared(projected), tokens, slots)


class NormOverHeadsAttention(_PreparedAttention):
    _config: NormOverHeadsAttentionConfig
    q_norm: NormOverHeads
    k_norm: NormOverHeads

    def _head_norms(self, layer_context: LayerContext) -> tuple[None, None]:
        config, tp = self._config, self._tp
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_norm = NormOverHeads(q_size, tp.size, config.qk_norm, "q_norm", layer_context, self._order)
        self.k_norm = NormOverHeads(kv_size, self._kv_parts, config.qk_norm, "k_norm", layer_context, self._order)
        return None, None

    def _prepared(self, qkv: torch.Tensor) -> torch.Tensor:
        q_size, k_size = self._sizes
        self.q_norm.apply_(qkv[:, :q_size])
        self.k_norm.apply_(qkv[:, q_size : q_size + k_size])
        return qkv


class GatedAttention(SelfAttention):
    """The gate is a fourth output of qkv_proj, split over ranks like the queries."""

    def _outputs(self, outputs: dict[str, int]) -> dict[str, int]:
        return {**outputs, "q_gate": outputs["q_proj"]}

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        attended = super().mix(self._ungated(projected), tokens, ctx)
        return self._ops.gate(attended, projected[:, -self._sizes[0] :])

    def store(self, projected: torch.Tensor, tokens: ModelInput, slots: torch.Tensor) -> None:
        super().store(self._ungated(projected), tokens, slots)

    def _ungated(self, projected: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values: a view, each of whose rows is contiguous."""
        return projected[:, : -self._sizes[0]]


class ValueNormAttention(_PreparedAttention):
    _config: ValueNormAttentionConfig

    def _outputs(self, outputs: dict[str, int]) -> dict[str, int]:
        return {name: size for name, size in outputs.items() if not (self._config.k_eq_v and name == "v_proj")}

    def _prepared(self, qkv: torch.Tensor) -> torch.Tensor:
        config, (q_size, kv_size) = self._config, self._sizes
        if config.k_eq_v:
            qkv = torch.cat([qkv, qkv[:, q_size:]], dim=1)
        values = qkv[:, q_size + kv_size :].unflatten(1, (-1, config.head_dim))
        values32 = values.float()
        values.copy_(values32 * torch.rsqrt(values32.square().mean(-1, keepdim=True) + config.value_norm_eps))
        return qkv


class _ScaledQueriesAttention(SelfAttention):
    """Queries are multiplied by something once they are rotated, which no kernel that rotates itself does."""

    def mix(self, projected: torch.Tensor, tokens: ModelInput, ctx: ForwardContext) -> torch.Tensor:
        q = self._rotated(projected, tokens, ctx.slots[self._layer.cache_group])
        return ctx.attention.attend(self._layer, q.mul_(self._factors(tokens.positions))).flatten(1)

    @abstractmethod
    def _factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Of queries [num_tokens, local num_q_heads, head_dim] at these true positions, int [num_tokens]."""


class TemperatureTunedAttention(_ScaledQueriesAttention):
    _config: TemperatureTunedAttentionConfig

    def __init__(self, config: TemperatureTunedAttentionConfig, hidden_size: int, layer_context: LayerContext) -> None:
        super().__init__(config, hidden_size, layer_context)
        max_seq_len, device = len(self._rope.cos_sin), layer_context.device
        self._temperatures = query_temperatures(config.tuning, max_seq_len, device).view(-1, 1, 1)

    def _factors(self, positions: torch.Tensor) -> torch.Tensor:
        return self._temperatures[positions]


class NormBehindRopeAttention(_ScaledQueriesAttention):
    """The rotation does not change a head's RMS, so only the norm's weights come after it. Scores are dot products of
    queries and keys, so the keys' weights can be multiplied into the queries."""

    q_norm: RMSNorm
    k_norm: RMSNorm

    def _head_norms(self, layer_context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        super()._head_norms(layer_context)
        one = torch.ones(self._config.head_dim, dtype=layer_context.dtype, device=layer_context.device)
        self._weights = one  # [head_dim], see `derive_weights`
        return one, one

    def derive_weights(self) -> None:
        self._weights = self.q_norm.weight.float() * self.k_norm.weight.float()

    def _factors(self, positions: torch.Tensor) -> torch.Tensor:
        return self._weights
