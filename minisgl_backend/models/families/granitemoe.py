"""Granite 3 with experts: Granite's multipliers, and mixtures like Mixtral's."""

from minisgl_backend.models.families import granite
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import mixtral_experts


def read(keys: Keys) -> DecoderConfig:
    mixture = mixtral_experts(keys)
    return granite.read(keys).with_layers(mlp=mixture)


FAMILY = Family(
    model_type="granitemoe",
    read=read,
    tensor_names=TensorNames(
        stored=(
            Stored(name="block_sparse_moe.router.layer", of=("mlp.gate",)),
            Stored(name="block_sparse_moe.input_linear", of=("mlp.experts.gate_proj", "mlp.experts.up_proj")),
            Stored(name="block_sparse_moe.output_linear", of=("mlp.experts.down_proj",)),
        )
    ),
)
