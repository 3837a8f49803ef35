"""OLMo 2: norms of the outputs of attention and MLP, not of their inputs, and over all query and key heads together."""

from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import llama_attention, mlp, norm, uniform


def read(keys: Keys) -> DecoderConfig:
    return uniform(
        keys,
        llama_attention(keys, NormOverHeadsAttentionConfig, qk_norm=norm(keys, eps=1e-5)),
        mlp(keys),
        norm(keys, eps=1e-5),
        norms="after",
    )


FAMILY = Family(model_type="olmo2", read=read)
