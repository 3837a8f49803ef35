"""Qwen3: RMSNorm of each query and key head before the rotation."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import AttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, decoder, mlp, norm
from minisgl_backend.models.families.qwen2 import windows_above


def read(keys: Keys) -> DecoderConfig:
    heads = head_norm_attention(keys, head_dim=128)
    layer = LayerConfig(mixer=heads, mlp=mlp(keys), norm=norm(keys))
    windows = windows_above(keys)
    return decoder(keys, [layer.with_mixer(window=size) for size in windows])


def head_norm_attention(keys: Keys, head_dim: int | None = None) -> AttentionConfig:
    """`head_dim`: where the key is absent."""
    bias = keys.boolean("attention_bias", False)
    return attention(keys, head_dim=head_dim, bias=bias, qk_norm=norm(keys))


FAMILY = Family(model_type="qwen3", read=read)
