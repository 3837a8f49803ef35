"""Youtu-LLM: DeepSeek-V3's latent attention (MLA), with dense MLPs."""

from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import mlp, norm, uniform
from minisgl_backend.models.families.deepseek_v2 import latent_attention
from minisgl_backend.models.families.deepseek_v3 import FAMILY as DEEPSEEK_V3


def read(keys: Keys) -> DecoderConfig:
    keys.without_effect("embedding_initializer_range")  # of training
    return uniform(
        keys, latent_attention(keys, interleaved=keys.boolean("rope_interleave", True)), mlp(keys), norm(keys)
    )


_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FAMILY = Family(
    model_type="youtu",
    read=read,
    defaults={"tie_word_embeddings": True, **{size: DEEPSEEK_V3.defaults[size] for size in _SIZES}},
)
