"""Granite 3: Llama with multipliers of embedding, attention scores, residual stream and logits."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(
            keys,
            num_kv_heads=keys.integer("num_attention_heads"),
            qkv_bias=bias,
            output_bias=bias,
            scale=keys.number("attention_multiplier", 1.0),
        ),
        mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm=norm(keys),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
    )
    return decoder(
        keys,
        [layer] * keys.integer("num_hidden_layers"),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / keys.number("logits_scaling", 1.0),
    )


FAMILY = Family(model_type="granite", read=read)
