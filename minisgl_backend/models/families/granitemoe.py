"""Granite 3 with experts: Granite's multipliers, and mixtures like Mixtral's."""

from __future__ import annotations

from dataclasses import replace

from minisgl_backend.models.families import granite
from minisgl_backend.models.families.base import (
    DecoderConfig,
    Family,
    Keys,
    MoeConfig,
    RouterConfig,
    Stored,
    TensorNames,
)
from minisgl_backend.models.families.common import expert_counts


def read(keys: Keys) -> DecoderConfig:
    num_experts, experts_per_token = expert_counts(keys, "num_local_experts", 8, per_token=2)
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
