"""ERNIE 4.5, dense: Llama with interleaved rope."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_bias", (False,))
    layer = LayerConfig(
        mixer=attention(keys, rope=read_rope(keys, keys.integer("head_dim"), interleaved=True)),
        mlp=mlp(keys),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="ernie4_5",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 500000.0},
)
