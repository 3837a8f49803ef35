"""Command R: LayerNorm without a bias, attention and MLP in parallel, interleaved rope."""

from collections.abc import Sequence

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig, RopeConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, decoder, mlp


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_qk_norm", (False,))
    layer = parallel_layer(keys, cohere_rope(keys), None)
    return cohere(keys, [layer] * keys.integer("num_hidden_layers"))


def cohere(keys: Keys, layers: Sequence[LayerConfig]) -> DecoderConfig:
    return decoder(keys, layers, logits_multiplier=keys.number("logit_scale", 0.0625))


def parallel_layer(keys: Keys, rope: RopeConfig | None, window: int | None) -> LayerConfig:
    bias = keys.boolean("attention_bias", False)
    return LayerConfig(
        mixer=attention(keys, num_kv_heads=keys.integer("num_attention_heads"), bias=bias, rope=rope, window=window),
        mlp=mlp(keys),
        norm=NormConfig(eps=keys.number("layer_norm_eps", 1e-5), kind="layer"),
        norms="parallel",
    )


def cohere_rope(keys: Keys) -> RopeConfig:
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    return read_rope(keys, head_dim, interleaved=True)


FAMILY = Family(model_type="cohere", read=read, defaults={"rope_theta": 500_000.0, "tie_word_embeddings": True})
