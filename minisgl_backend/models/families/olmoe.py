"""OLMoE: Qwen's experts, RMSNorm over all heads together."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, attention, decoder, norm
from minisgl_backend.models.families.qwen3_moe import experts
from minisgl_backend.models.keys import Keys, refuse


def read(keys: Keys) -> DecoderConfig:
    bias = keys.boolean("attention_bias", False)
    if (clip := keys.get("clip_qkv")) is not None:
        refuse("clip_qkv", clip, "null")
    layer = LayerConfig(
        mixer=attention(
            keys,
            NormOverHeadsAttentionConfig,
            num_kv_heads=keys.integer("num_attention_heads"),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm(keys, eps=1e-5),
        ),
        mlp=experts(keys, size_key="intermediate_size"),
        norm=norm(keys, eps=1e-5),
    )
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"))


FAMILY = Family(model_type="olmoe", read=read, defaults={"num_experts": 64, "num_experts_per_tok": 8})
