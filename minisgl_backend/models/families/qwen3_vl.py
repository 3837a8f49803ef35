"""Qwen3-VL, text: Qwen3 without the image encoder."""

from functools import partial

from minisgl_backend.layers.mixer_config import AttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, mlp, norm, uniform
from minisgl_backend.models.families.eyes import qwen_vision
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES


def read(keys: Keys) -> DecoderConfig:
    return uniform(keys, text_attention(keys, head_dim=128), mlp(keys), norm(keys))


def text_attention(keys: Keys, head_dim: int) -> AttentionConfig:
    """`head_dim`: where the key is absent."""
    bias, head_dim = keys.boolean("attention_bias", False), keys.integer("head_dim", head_dim)
    rope = read_rope(keys, head_dim, mrope="interleaved")
    return attention(keys, head_dim=head_dim, qkv_bias=bias, output_bias=bias, qk_norm=norm(keys), rope=rope)


ENCODER = partial(qwen_vision, generation="3")

FAMILY = Family(
    model_type="qwen3_vl",
    read=read,
    defaults={"num_key_value_heads": 32, "rope_theta": 500_000.0},
    text_config="text_config",
    tensor_names=TEXT_NAMES,
    encoder=ENCODER,
)
