"""Nemotron-4 and Minitron: LayerNorm that stores weight - 1, an MLP without a gate, rope over half of each head."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, ungated_mlp
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // num_q_heads)
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(
            keys,
            num_kv_heads=num_q_heads,
            qkv_bias=bias,
            output_bias=bias,
            rope=read_rope(keys, head_dim, partial=True, part=0.5),
        ),
        mlp=ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", False)),
        norm=NormConfig(eps=keys.number("norm_eps", 1e-5), kind="layer", bias=True, weight_offset=1.0),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="nemotron", read=read)
