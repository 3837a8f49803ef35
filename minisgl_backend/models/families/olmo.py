"""OLMo, the first: Llama with a LayerNorm that has no weights."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp
from minisgl_backend.models.keys import Keys, refuse


def read(keys: Keys) -> DecoderConfig:
    if (clip := keys.get("clip_qkv")) is not None:
        refuse("clip_qkv", clip, "null")
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(keys, num_kv_heads=keys.integer("num_attention_heads"), qkv_bias=bias, output_bias=bias),
        mlp=mlp(keys),
        norm=NormConfig(eps=1e-5, kind="layer", weight=False),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="olmo", read=read)
