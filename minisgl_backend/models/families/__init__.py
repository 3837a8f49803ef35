"""The architectures that are served natively: one table, one file a family, none of which needs torch."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.models.families import (
    cohere,
    cohere2,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    granite,
    llama,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from minisgl_backend.models.families.common import Family

FAMILIES: Mapping[str, Family] = {  # by the name in config.json's `architectures`
    "Cohere2ForCausalLM": cohere2.FAMILY,
    "CohereForCausalLM": cohere.FAMILY,
    "Dots1ForCausalLM": dots1.FAMILY,
    "Ernie4_5ForCausalLM": ernie4_5.FAMILY,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe.FAMILY,
    "Exaone4ForCausalLM": exaone4.FAMILY,
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.MULTIMODAL_FAMILY,
    "Glm4ForCausalLM": glm4.FAMILY,
    "Glm4MoeForCausalLM": glm4_moe.FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MiniMaxM2ForCausalLM": minimax_m2.FAMILY,
    "MinistralForCausalLM": ministral.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Olmo3ForCausalLM": olmo3.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
    "SeedOssForCausalLM": seed_oss.FAMILY,
    "SmolLM3ForCausalLM": smollm3.FAMILY,
}
