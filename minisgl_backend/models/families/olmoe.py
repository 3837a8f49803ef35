"""OLMoE: Qwen's experts, RMSNorm over all heads together."""

from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import llama_attention, norm, uniform
from minisgl_backend.models.families.qwen3_moe import experts


def read(keys: Keys) -> DecoderConfig:
    if (clip := keys.get("clip_qkv")) is not None:
        refuse("clip_qkv", clip, "null")
    return uniform(
        keys,
        llama_attention(keys, NormOverHeadsAttentionConfig, qk_norm=norm(keys, eps=1e-5)),
        experts(keys, size_key="intermediate_size"),
        norm(keys, eps=1e-5),
    )


FAMILY = Family(model_type="olmoe", read=read, defaults={"num_experts": 64, "num_experts_per_tok": 8})
