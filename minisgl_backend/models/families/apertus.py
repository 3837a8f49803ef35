"""Apertus: head norms, and an MLP without a gate whose activation (xIELU) is learned."""

from minisgl_backend.layers.config import UngatedMlpConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import llama_attention, norm, uniform

_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read(keys: Keys) -> DecoderConfig:
    keys.choice("hidden_act", ("xielu",))
    # Keys of the released models whose values transformers assumes.
    keys.choice("mlp_bias", (False,))
    keys.choice("post_norm", (False,))
    keys.choice("qk_norm", (True,))
    return uniform(
        keys,
        llama_attention(keys, qk_norm=norm(keys, eps=1e-5)),
        UngatedMlpConfig(intermediate_size=keys.integer("intermediate_size"), activation="xielu"),
        norm(keys, eps=1e-5),
    )


FAMILY = Family(
    model_type="apertus",
    read=read,
    defaults={"rope_theta": 12_000_000.0, "rope_parameters": _ROPE},
    tensor_names=TensorNames(
        stored=(
            Stored(name="attention_layernorm", of=("input_layernorm",)),
            Stored(name="feedforward_layernorm", of=("post_attention_layernorm",)),
        )
    ),
)
