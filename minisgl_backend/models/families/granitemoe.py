"""Granite 3 with experts: Granite's multipliers, and mixtures like Mixtral's."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.layers.config import MoeConfig, RouterConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families import granite
from minisgl_backend.models.families.common import Family
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.weights.names import Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    num_experts, experts_per_token = keys.integer("num_local_experts", 8), keys.integer("num_experts_per_tok", 2)
    if experts_per_token > num_experts:
        refuse("num_experts_per_tok", experts_per_token, f"1 to num_local_experts ({num_experts})")
    keys.choice("hidden_act", ("silu",))
    mixture = MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer("intermediate_size"),
        router=RouterConfig(renormalize=True),  # a softmax over the best logits only
    )
    dense = granite.read(keys)
    return replace(dense, layers=tuple(replace(layer, mlp=mixture) for layer in dense.layers))


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
