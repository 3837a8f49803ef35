"""Seed-OSS: Llama with biases on queries, keys and values."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        attention(
            keys, qkv_bias=keys.boolean("attention_bias", True), output_bias=keys.boolean("attention_out_bias", False)
        ),
        mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm(keys),
    )


FAMILY = Family(model_type="seed_oss", read=read, defaults={"head_dim": 128, "num_key_value_heads": 8})
