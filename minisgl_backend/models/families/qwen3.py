"""Qwen3: RMSNorm of each query and key head before the rotation."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.layers.config import AttentionConfig, LayerConfig, MlpConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm
from minisgl_backend.models.families.qwen2 import windows_above
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    keys.choice("hidden_act", ("silu",))
    layer = LayerConfig(
        attention=head_norm_attention(keys, head_dim=128),
        mlp=MlpConfig(intermediate_size=keys.integer("intermediate_size")),
        norm=norm(keys),
    )
    windows = windows_above(keys)
    return decoder(keys, [replace(layer, attention=replace(layer.attention, window=size)) for size in windows])


def head_norm_attention(keys: Keys, head_dim: int | None = None) -> AttentionConfig:
    """`head_dim`: where the key is absent."""
    bias = keys.boolean("attention_bias", False)
    return attention(keys, head_dim=head_dim, qkv_bias=bias, output_bias=bias, qk_norm=norm(keys))


FAMILY = Family(model_type="qwen3", read=read)
