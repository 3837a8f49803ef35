"""InternLM3: Llama, with one key for the biases around attention and one for those of the MLP."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", keys.boolean("qkv_bias", False))
    keys.choice("mlp_bias" if keys.get("mlp_bias") is not None else "bias", (bias,))  # as in transformers
    layer = LayerConfig(
        mixer=attention(keys, qkv_bias=bias, output_bias=bias),
        mlp=mlp(keys, bias=bias),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="internlm3",
    read=read,
    defaults={"num_key_value_heads": 2, "head_dim": 128},
)
