"""Mixtral: Mistral with a mixture of experts in every layer."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import attention, mixtral_experts, norm, uniform, window


def read(keys: Keys) -> DecoderConfig:
    mixture = mixtral_experts(keys)
    return uniform(keys, attention(keys, window=window(keys, None)), mixture, norm(keys, eps=1e-5))


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
