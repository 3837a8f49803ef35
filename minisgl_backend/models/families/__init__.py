"""The architectures that are served natively: one table, one file a family, none of which needs torch."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl_backend.models.families import llama, mistral, mixtral, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe
from minisgl_backend.models.families.common import Family

FAMILIES: Mapping[str, Family] = {  # by the name in config.json's `architectures`
    "LlamaForCausalLM": llama.FAMILY,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen2MoeForCausalLM": qwen2_moe.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}
