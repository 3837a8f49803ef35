"""Granite with experts, windows in three of four layers, attention sinks in all layers, and a rope theta per layer."""

from minisgl_backend.models.families import granitemoeshared
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.granite_swa import with_sinks
from minisgl_backend.models.families.granitemoeshared import SHARED_MLP


def read(keys: Keys) -> DecoderConfig:
    return with_sinks(keys, granitemoeshared.read(keys))


FAMILY = Family(
    model_type="granitemoe_swa",
    read=read,
    tensor_names=TensorNames(
        stored=(
            Stored(name="block_sparse_moe.router", of=("mlp.gate",)),
            Stored(
                name="block_sparse_moe.experts.gate_up_proj",
                of=("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
            ),
            Stored(name="block_sparse_moe.experts.down_proj", of=("mlp.experts.down_proj.weight",)),
            *SHARED_MLP,
        )
    ),
)
