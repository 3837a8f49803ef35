"""AFM (Arcee): Llama with an MLP without a gate, whose activation is relu(x) ** 2."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm, ungated_mlp
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(keys, num_kv_heads=keys.integer("num_attention_heads"), qkv_bias=bias, output_bias=bias),
        mlp=ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", False)),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="arcee", read=read)
