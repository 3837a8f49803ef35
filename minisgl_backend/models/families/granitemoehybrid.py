"""Granite 4.0 without recurrent layers (micro, 1B, 350M): Granite with gate and up merged."""

from dataclasses import replace

from minisgl_backend.layers.config import MlpConfig
from minisgl_backend.models.families import granite
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import activation, layer_types

_ATTENTION = "attention"  # in its own configs; full_attention in those of recent transformers


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    key = "layer_types" if keys.get("layer_types") else "layers_block_type"
    layer_types(keys, num_layers, allowed=(FULL, _ATTENTION), key=key)
    keys.without_effect("layer_types", "layers_block_type", "num_experts_per_tok")
    keys.without_effect(*(f"mamba_{name}" for name in _MAMBA), "time_step_limit", "normalization_function")
    keys.choice("num_local_experts", (0,))
    size = keys.integer("shared_intermediate_size", 1024)
    keys.without_effect("intermediate_size")  # of one expert
    has_rope = keys.choice("position_embedding_type", (None, "rope", "nope")) == "rope"
    dense = granite.read(keys)
    mlp = MlpConfig(intermediate_size=size, activation=activation(keys))
    unrotated = {} if has_rope else {"rope": None}
    return replace(dense, layers=tuple(replace(layer.with_mixer(**unrotated), mlp=mlp) for layer in dense.layers))


_MAMBA = ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads", "proj_bias")

FAMILY = Family(
    model_type="granitemoehybrid",
    read=read,
    defaults={"intermediate_size": 11008},
    tensor_names=TensorNames(
        stored=(
            Stored(name="shared_mlp.input_linear", of=("mlp.gate_proj", "mlp.up_proj")),
            Stored(name="shared_mlp.output_linear", of=("mlp.down_proj",)),
        )
    ),
)
