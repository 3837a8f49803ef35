"""InternLM3: Llama, with one key for the biases around attention and one for those of the MLP."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", keys.boolean("qkv_bias", False))
    keys.choice("mlp_bias" if keys.get("mlp_bias") is not None else "bias", (bias,))  # as in transformers
    return uniform(keys, attention(keys, qkv_bias=bias, output_bias=bias), mlp(keys, bias=bias), norm(keys, eps=1e-5))


FAMILY = Family(model_type="internlm3", read=read, defaults={"num_key_value_heads": 2, "head_dim": 128})
