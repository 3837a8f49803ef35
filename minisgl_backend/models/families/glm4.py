"""GLM-4 (0414): norms before and after attention and MLP, interleaved rope over half of each head, merged gate_up."""

from minisgl_backend.models.families import glm
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    return glm.read(keys).with_layers(norms="both")


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
