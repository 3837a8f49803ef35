"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    layer = LayerConfig(
        mixer=attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", True),
            output_bias=keys.boolean("attention_out_bias", False),
        ),
        mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm=norm(keys),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="seed_oss", read=read, defaults={"head_dim": 128, "num_key_value_heads": 8})
