"""Qwen3-VL, text: Qwen3 without the image encoder."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import AttentionConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    layer = LayerConfig(mixer=text_attention(keys, head_dim=128), mlp=mlp(keys), norm=norm(keys))
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


def text_attention(keys: Keys, head_dim: int) -> AttentionConfig:
    """`head_dim`: where the key is absent."""
    bias, head_dim = keys.boolean("attention_bias", False), keys.integer("head_dim", head_dim)
    rope = read_rope(keys, head_dim, mrope=True)
    return attention(keys, head_dim=head_dim, qkv_bias=bias, output_bias=bias, qk_norm=norm(keys), rope=rope)


FAMILY = Family(
    model_type="qwen3_vl",
    read=read,
    defaults={"num_key_value_heads": 32, "rope_theta": 500_000.0},
    text_config="text_config",
    tensor_names=TEXT_NAMES,
)
