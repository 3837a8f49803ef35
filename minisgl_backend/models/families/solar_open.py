"""Solar Open: Llama with the mixtures of DeepSeek-V3 in every layer."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm
from minisgl_backend.models.families.glm4_moe import routed_experts
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import SHARED_EXPERTS, TensorNames


def read(keys: Keys) -> DecoderConfig:
    keys.choice("first_k_dense_replace", (0,))
    keys.choice("use_qk_norm", (False,))
    layer = LayerConfig(
        mixer=attention(
            keys,
            qkv_bias=keys.boolean("attention_bias", False),
            rope=read_rope(keys, keys.integer("head_dim"), partial=True),
        ),
        mlp=routed_experts(keys),
        norm=norm(keys, eps=1e-5),
    )
    keys.without_effect("intermediate_size")  # of dense layers, of which there are none
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(
    model_type="solar_open",
    read=read,
    defaults={"head_dim": 128, "rope_theta": 1_000_000.0},
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
