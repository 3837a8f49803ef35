"""Jais 2: LayerNorm, biases everywhere, an MLP without a gate, whose activation is relu(x) ** 2."""

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, ungated_mlp, uniform


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", True)
    return uniform(
        keys,
        attention(keys, num_kv_heads=keys.integer("num_attention_heads"), qkv_bias=bias, output_bias=bias),
        ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", True)),
        NormConfig(eps=keys.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
    )


FAMILY = Family(model_type="jais2", read=read)
