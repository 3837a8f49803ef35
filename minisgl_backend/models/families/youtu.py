"""Youtu-LLM: DeepSeek-V3's latent attention (MLA), with dense MLPs."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import mlp, norm, uniform
from minisgl_backend.models.families.deepseek_v2 import SIZES, latent_attention


def read(keys: Keys) -> DecoderConfig:
    keys.without_effect("embedding_initializer_range")  # of training
    return uniform(
        keys, latent_attention(keys, interleaved=keys.boolean("rope_interleave", True)), mlp(keys), norm(keys)
    )


FAMILY = Family(model_type="youtu", read=read, defaults={"tie_word_embeddings": True, **SIZES})
