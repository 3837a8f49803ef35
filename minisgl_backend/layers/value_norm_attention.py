"""Self-attention with a norm of the values (Gemma 4)."""

from __future__ import annotations

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.config import AttentionConfig, ValueNormAttentionConfig
from minisgl_backend.layers.context import ForwardContext


class ValueNormAttention(SelfAttention):
    """As `ValueNormAttentionConfig` says."""

    def _outputs(self, config: AttentionConfig) -> dict[str, int]:
        outputs = super()._outputs(config)
        if isinstance(config, ValueNormAttentionConfig) and config.values_are_keys:
            del outputs["v_proj"]
        return outputs

    def heads(self, qkv: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return super().heads(self._with_values(qkv), positions, ctx)

    def store(self, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        super().store(self._with_values(qkv), positions, slots)

    def _with_values(self, qkv: torch.Tensor) -> torch.Tensor:
        """qkv_proj's outputs, which may be overwritten, -> qkv as `SelfAttention` takes it."""
        config, (q_size, kv_size) = self._config, self._sizes
        assert isinstance(config, ValueNormAttentionConfig), "models.decoder chooses by it"
        if config.values_are_keys:
            qkv = torch.cat([qkv, qkv[:, q_size:]], dim=1)
        values = qkv[:, q_size + kv_size :].unflatten(1, (-1, config.head_dim))
        values32 = values.float()
        values.copy_(values32 * torch.rsqrt(values32.square().mean(-1, keepdim=True) + config.value_norm_eps))
        return qkv
