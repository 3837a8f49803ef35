"""Llama 2, 3, 3.1, 3.2 (text), 3.3, and models of the same architecture."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import (
    FULL,
    Family,
    attention,
    decoder,
    layer_types,
    mlp,
    norm,
)
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    layer_types(keys, num_layers, allowed=(FULL,))
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(
            keys,
            num_kv_heads=keys.integer("num_attention_heads"),
            qkv_bias=bias,
            output_bias=bias,
        ),
        mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm=norm(keys),
    )
    return decoder(keys, [layer] * num_layers)


FAMILY = Family(model_type="llama", read=read)
