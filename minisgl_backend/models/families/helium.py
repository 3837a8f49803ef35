"""Helium: Llama with interleaved rope."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope, refuse
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    head_dim = keys.integer("head_dim")
    if num_heads * head_dim != hidden_size:  # of the attention's output
        refuse("head_dim", head_dim, f"hidden_size / num_attention_heads ({hidden_size} / {num_heads})")
    return uniform(
        keys,
        attention(
            keys, qkv_bias=keys.boolean("attention_bias", False), rope=read_rope(keys, head_dim, interleaved=True)
        ),
        mlp(keys, bias=keys.boolean("mlp_bias", False)),
        norm(keys, eps=1e-8),
    )


FAMILY = Family(
    model_type="helium", read=read, defaults={"head_dim": 128, "num_key_value_heads": 20, "rope_theta": 100_000.0}
)
