"""StableLM: LayerNorm, rope over a quarter of each head; in some models attention and MLP in parallel."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, mlp
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    keys.choice("qk_layernorm", (False,))
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    layer = LayerConfig(
        mixer=attention(
            keys,
            num_kv_heads=32,
            qkv_bias=keys.boolean("use_qkv_bias", False),
            rope=read_rope(keys, head_dim, partial=True, part=0.25),
        ),
        mlp=mlp(keys),
        norm=NormConfig(eps=keys.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        norms="parallel" if keys.boolean("use_parallel_residual", False) else "before",
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="stablelm", read=read)
