"""Granite 3 with experts and a shared expert."""

from dataclasses import replace

from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.models.families import granitemoe
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    without = granitemoe.read(keys)
    size = keys.integer("shared_intermediate_size", 0, least=0)
    layers = []
    for layer in without.layers:
        assert isinstance(layer.mlp, MoeConfig), "all layers of Granite-MoE have experts"
        layers.append(replace(layer, mlp=replace(layer.mlp, shared_intermediate_size=size)))
    return replace(without, layers=tuple(layers))


SHARED_MLP = (
    Stored(name="shared_mlp.input_linear", of=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
    Stored(name="shared_mlp.output_linear", of=("mlp.shared_expert.down_proj",)),
)

FAMILY = Family(
    model_type="granitemoeshared",
    read=read,
    tensor_names=TensorNames(stored=(*granitemoe.FAMILY.tensor_names.stored, *SHARED_MLP)),
)
