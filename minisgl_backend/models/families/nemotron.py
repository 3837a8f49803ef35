"""Nemotron-4 and Minitron: LayerNorm that stores weight - 1, an MLP without a gate, rope over half of each head."""

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, ungated_mlp, uniform


def read(keys: Keys) -> DecoderConfig:
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // num_q_heads)
    bias = keys.boolean("attention_bias", False)
    return uniform(
        keys,
        attention(keys, num_kv_heads=num_q_heads, bias=bias, rope=read_rope(keys, head_dim, partial=True, part=0.5)),
        ungated_mlp(keys, "relu2", bias=keys.boolean("mlp_bias", False)),
        NormConfig(eps=keys.number("norm_eps", 1e-5), kind="layer", bias=True, weight_offset=1.0),
    )


FAMILY = Family(model_type="nemotron", read=read)
