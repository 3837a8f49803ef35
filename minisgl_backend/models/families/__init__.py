"""The architectures that are served natively: one table, one file a family, none of which needs torch."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.models.families import (
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from minisgl_backend.models.families.common import Family

FAMILIES: Mapping[str, Family] = {  # by the name in config.json's `architectures`
    "Gemma2ForCausalLM": gemma2.FAMILY,
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.MULTIMODAL_FAMILY,
    "GraniteForCausalLM": granite.FAMILY,
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}
