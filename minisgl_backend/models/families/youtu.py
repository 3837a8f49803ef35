"""Youtu-LLM: DeepSeek-V3's latent attention (MLA), with dense MLPs."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, decoder, mlp, norm
from minisgl_backend.models.families.deepseek_v2 import latent_attention
from minisgl_backend.models.families.deepseek_v3 import FAMILY as DEEPSEEK_V3
from minisgl_backend.models.keys import Keys


def read(keys: Keys) -> DecoderConfig:
    keys.without_effect("embedding_initializer_range")  # of training
    layer = LayerConfig(
        mixer=latent_attention(keys, interleaved=keys.boolean("rope_interleave", True)),
        mlp=mlp(keys),
        norm=norm(keys),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


_SIZES = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FAMILY = Family(
    model_type="youtu",
    read=read,
    defaults={"tie_word_embeddings": True, **{size: DEEPSEEK_V3.defaults[size] for size in _SIZES}},
)
