"""Gemma: Llama with GeGLU, norms that store weight - 1, and a scaled embedding."""

import math

from minisgl_backend.layers.config import MlpConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_bidirectional_attention", (False,))
    # "gelu" in its first configs means the tanh approximation; later ones have it under another key.
    keys.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"))
    keys.choice("hidden_activation", ("gelu_pytorch_tanh",))
    bias = keys.boolean("attention_bias", False)
    return uniform(
        keys,
        attention(keys, bias=bias),
        MlpConfig(intermediate_size=keys.integer("intermediate_size"), activation="gelu_tanh"),
        norm(keys, weight_offset=1.0),
        embedding_multiplier=math.sqrt(keys.integer("hidden_size")),
    )


FAMILY = Family(
    model_type="gemma", read=read, defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True}
)
