"""GLM-4 (0414): norms before and after attention and MLP, interleaved rope over half of each head, merged gate_up."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", True),
            rope=read_rope(keys, keys.integer("head_dim"), partial=True, interleaved=True),
        ),
        mlp(keys),
        norm(keys, eps=1.5625e-07),
        norms="both",
    )


FAMILY = Family(
    model_type="glm4",
    read=read,
    defaults={"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    tensor_names=TensorNames(
        stored=(
            Stored(name="mlp.gate_up_proj", of=("mlp.gate_proj", "mlp.up_proj")),
            Stored(name="post_self_attn_layernorm", of=("post_attention_layernorm",)),
            Stored(name="post_attention_layernorm", of=("pre_feedforward_layernorm",)),
            Stored(name="post_mlp_layernorm", of=("post_feedforward_layernorm",)),
        )
    ),
)
