"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm, window
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.weights.names import Stored, TensorNames


def read(keys: Keys) -> DecoderConfig:
    keys.choice("hidden_act", ("silu",))
    num_experts, experts_per_token = keys.integer("num_local_experts", 8), keys.integer("num_experts_per_tok", 2)
    if experts_per_token > num_experts:
        refuse("num_experts_per_tok", experts_per_token, f"1 to num_local_experts ({num_experts})")
    layer = LayerConfig(
        mixer=attention(keys, window=window(keys, None)),
        mlp=MoeConfig(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=keys.integer("intermediate_size"),
            router=RouterConfig(renormalize=True),
        ),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


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
