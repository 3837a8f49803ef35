"""Helium: Llama with interleaved rope."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    head_dim = keys.integer("head_dim")
    if num_heads * head_dim != hidden_size:  # of the attention's output
        refuse("head_dim", head_dim, f"hidden_size / num_attention_heads ({hidden_size} / {num_heads})")
    layer = LayerConfig(
        mixer=attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", False),
            rope=read_rope(keys, head_dim, interleaved=True),
        ),
        mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm=norm(keys, eps=1e-8),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="helium",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 20, "rope_theta": 100_000.0},
)
