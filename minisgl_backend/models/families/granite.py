"""Granite 3: Llama with multipliers of embedding, attention scores, residual stream and logits."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import llama_attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        llama_attention(keys, scale=keys.number("attention_multiplier", 1.0)),
        mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm(keys),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        logits_multiplier=1.0 / keys.number("logits_scaling", 1.0),
    )


FAMILY = Family(model_type="granite", read=read)
