"""Gemma 2: norms before and after attention and MLP, which store weight - 1; soft caps of scores and logits; a window
in every second layer."""

import math
from typing import Any

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, decoder, every, layer_types, mlp, norm, window

DEFAULTS: dict[str, Any] = {  # shared by Gemma 2 and 3
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    rope = read_rope(keys, keys.integer("head_dim"))
    types = layer_types(keys, num_layers) or every(2, num_layers)
    return gemma(keys, types, dict.fromkeys(types, rope))


def gemma(keys: Keys, types: tuple[str, ...], ropes: dict[str, RopeConfig], **more: Any) -> DecoderConfig:
    """The parts that Gemma 2 and 3 share. types: by layer, keys of `ropes`. more: fields of attention."""
    keys.choice("use_bidirectional_attention", (False,))
    bias = keys.boolean("attention_bias", False)
    size = window(keys, None)

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(
            mixer=attention(
                keys,
                bias=bias,
                rope=ropes[kind],
                window=size if kind == SLIDING else None,
                scale=keys.number("query_pre_attn_scalar") ** -0.5,
                soft_cap=keys.optional_number("attn_logit_softcapping"),
                **more,
            ),
            mlp=mlp(keys, "hidden_activation"),
            norm=norm(keys, weight_offset=1.0),
            norms="both",
        )

    # A key of its first configs, which transformers does not read.
    keys.without_effect("hidden_act")
    return decoder(
        keys,
        [layer(kind) for kind in types],
        embedding_multiplier=math.sqrt(keys.integer("hidden_size")),
        logits_soft_cap=keys.optional_number("final_logit_softcapping"),
    )


FAMILY = Family(
    model_type="gemma2",
    read=read,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)
