"""Apertus: head norms, and an MLP without a gate whose activation (xIELU) is learned."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig, UngatedMlpConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm
from minisgl_backend.models.keys import Keys
from minisgl_backend.weights.names import Stored, TensorNames

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
    bias = keys.boolean("attention_bias", False)
    layer = LayerConfig(
        mixer=attention(
            keys,
            num_kv_heads=keys.integer("num_attention_heads"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm(keys, eps=1e-5),
        ),
        mlp=UngatedMlpConfig(intermediate_size=keys.integer("intermediate_size"), activation="xielu"),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


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
