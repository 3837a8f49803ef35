"""ERNIE 4.5, dense: Llama with interleaved rope."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    keys.choice("use_bias", (False,))
    return uniform(
        keys,
        attention(keys, rope=read_rope(keys, keys.integer("head_dim"), interleaved=True)),
        mlp(keys),
        norm(keys, eps=1e-5),
    )


FAMILY = Family(
    model_type="ernie4_5",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 500000.0},
)
