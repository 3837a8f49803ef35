"""Solar Open: Llama with the mixtures of DeepSeek-V3 in every layer."""

from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, norm, routed_experts, uniform


def read(keys: Keys) -> DecoderConfig:
    keys.choice("first_k_dense_replace", (0,))
    keys.choice("use_qk_norm", (False,))
    keys.without_effect("intermediate_size")  # of dense layers, of which there are none
    return uniform(
        keys,
        attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", False),
            rope=read_rope(keys, keys.integer("head_dim"), partial=True),
        ),
        routed_experts(keys),
        norm(keys, eps=1e-5),
    )


FAMILY = Family(
    model_type="solar_open",
    read=read,
    defaults={"head_dim": 128, "rope_theta": 1_000_000.0},
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
