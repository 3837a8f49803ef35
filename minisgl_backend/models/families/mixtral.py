"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from minisgl_backend.models.families.base import (
    DecoderConfig,
    Family,
    Keys,
    MoeConfig,
    RouterConfig,
    Stored,
    TensorNames,
)
from minisgl_backend.models.families.common import attention, expert_counts, norm, uniform, window


def read(keys: Keys) -> DecoderConfig:
    keys.choice("hidden_act", ("silu",))
    num_experts, experts_per_token = expert_counts(keys, "num_local_experts", 8, per_token=2)
    return uniform(
        keys,
        attention(keys, window=window(keys, None)),
        MoeConfig(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=keys.integer("intermediate_size"),
            router=RouterConfig(renormalize=True),
        ),
        norm(keys, eps=1e-5),
    )


def experts_stored() -> tuple[Stored, ...]:
    """Router and experts in Mixtral's checkpoints."""
    experts = (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
    return (
        Stored(name="block_sparse_moe.gate", of=("mlp.gate",)),
        *(
            Stored(name=f"block_sparse_moe.experts.{{expert}}.{name}", of=(f"mlp.experts.{of}",))
            for name, of in experts
        ),
    )


FAMILY = Family(
    model_type="mixtral",
    read=read,
    defaults={"rope_theta": 1_000_000.0},
    tensor_names=TensorNames(stored=experts_stored()),
)
