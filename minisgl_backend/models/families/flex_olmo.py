"""FlexOlmo: OLMoE with norms of the outputs of attention and experts."""

from minisgl_backend.models.families import olmoe
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys


def read(keys: Keys) -> DecoderConfig:
    return olmoe.read(keys).with_layers(norms="after")


FAMILY = Family(
    model_type="flex_olmo",
    read=read,
    defaults={"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0},
)
