"""StableLM: LayerNorm, rope over a quarter of each head; in some models attention and MLP in parallel."""

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, mlp, uniform


def read(keys: Keys) -> DecoderConfig:
    keys.choice("qk_layernorm", (False,))
    head_dim = keys.integer("hidden_size") // keys.integer("num_attention_heads")
    return uniform(
        keys,
        attention(
            keys,
            num_kv_heads=32,
            qkv_bias=keys.boolean("use_qkv_bias", False),
            rope=read_rope(keys, head_dim, partial=True, part=0.25),
        ),
        mlp(keys),
        NormConfig(eps=keys.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        norms="parallel" if keys.boolean("use_parallel_residual", False) else "before",
    )


FAMILY = Family(model_type="stablelm", read=read)
