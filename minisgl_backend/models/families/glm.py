"""GLM-4 (9B, of 2024): Llama with interleaved rope over half of each head, and merged gate and up."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", True),
            rope=read_rope(keys, keys.integer("head_dim"), partial=True, part=0.5, interleaved=True),
        ),
        mlp(keys),
        norm(keys, eps=1.5625e-07),
    )


FAMILY = Family(
    model_type="glm",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 2},
    tensor_names=TensorNames(stored=(Stored(name="mlp.gate_up_proj", of=("mlp.gate_proj", "mlp.up_proj")),)),
)
