"""Jais 2: LayerNorm, biases everywhere, an MLP without a gate, whose activation is relu(x) ** 2."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, ungated_mlp
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", True)
    layer = LayerConfig(
        mixer=attention(keys, num_kv_heads=keys.integer("num_attention_heads"), qkv_bias=bias, output_bias=bias),
        mlp=ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", True)),
        norm=NormConfig(eps=keys.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="jais2", read=read)
