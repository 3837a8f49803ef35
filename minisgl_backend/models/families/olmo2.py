"""OLMo 2: norms of the outputs of attention and MLP, not of their inputs, and over all query and key heads together."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(
            keys,
            NormOverHeadsAttentionConfig,
            num_kv_heads=keys.integer("num_attention_heads"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm(keys, eps=1e-5),
        ),
        mlp=mlp(keys),
        norm=norm(keys, eps=1e-5),
        norms="after",
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="olmo2", read=read)
