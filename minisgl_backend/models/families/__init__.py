"""The natively supported architectures: one table, and one file per family, none of which needs torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.models.families.base import Family


class Row(NamedTuple):
    """Where a family is defined."""

    module: str  # its file in this folder
    name: str = "FAMILY"  # in that file
    # transformers' class that runs it, which is also in `architectures` of what it saves, if it is another family's.
    runs_as: str | None = None


class Families(Mapping[str, Family]):
    """Families by the name in config.json's `architectures`. A family's file is imported on first access, so that a
    start imports one of them; `values()` and `items()` import all."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self._rows = rows

    def __getitem__(self, architecture: str) -> Family:
        row = self._rows[architecture]
        family: Family = load_attribute(f"{__name__}.{row.module}:{row.name}")
        return family

    def __contains__(self, architecture: object) -> bool:
        return architecture in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def run_as(self, architecture: str) -> Iterator[Family]:
        """The families that transformers runs with this class of another family."""
        return (self[name] for name, row in self._rows.items() if row.runs_as == architecture)


FAMILIES = Families(
    {
        "ApertusForCausalLM": Row("apertus"),
        "ArceeForCausalLM": Row("arcee"),
        "Cohere2ForCausalLM": Row("cohere2"),
        "CohereForCausalLM": Row("cohere"),
        "CwmForCausalLM": Row("cwm"),
        "DeepseekV2ForCausalLM": Row("deepseek_v2"),
        "DeepseekV3ForCausalLM": Row("deepseek_v3"),
        "Dots1ForCausalLM": Row("dots1"),
        "Ernie4_5ForCausalLM": Row("ernie4_5"),
        "Ernie4_5_MoeForCausalLM": Row("ernie4_5_moe"),
        "Exaone4ForCausalLM": Row("exaone4"),
        "ExaoneForCausalLM": Row("exaone", runs_as="LlamaForCausalLM"),
        "ExaoneMoeForCausalLM": Row("exaone_moe"),
        "FlexOlmoForCausalLM": Row("flex_olmo"),
        "Gemma2ForCausalLM": Row("gemma2"),
        "Gemma3ForCausalLM": Row("gemma3"),
        "Gemma3ForConditionalGeneration": Row("gemma3", "MULTIMODAL_FAMILY"),
        "Gemma4ForCausalLM": Row("gemma4"),
        "Gemma4ForConditionalGeneration": Row("gemma4", "MULTIMODAL_FAMILY"),
        "GemmaForCausalLM": Row("gemma"),
        "Glm4ForCausalLM": Row("glm4"),
        "Glm4MoeForCausalLM": Row("glm4_moe"),
        "Glm4MoeLiteForCausalLM": Row("glm4_moe_lite"),
        "Glm46VForConditionalGeneration": Row("glm4v", "FAMILY_46"),
        "Glm4vForConditionalGeneration": Row("glm4v"),
        "Glm4vMoeForConditionalGeneration": Row("glm4v", "MOE_FAMILY"),
        "GlmForCausalLM": Row("glm"),
        "GptOssForCausalLM": Row("gpt_oss"),
        "GraniteForCausalLM": Row("granite"),
        "GraniteMoeForCausalLM": Row("granitemoe"),
        "GraniteMoeHybridForCausalLM": Row("granitemoehybrid"),
        "GraniteMoeSWAForCausalLM": Row("granitemoe_swa"),
        "GraniteMoeSharedForCausalLM": Row("granitemoeshared"),
        "GraniteSWAForCausalLM": Row("granite_swa"),
        "HeliumForCausalLM": Row("helium"),
        "HunYuanDenseV1ForCausalLM": Row("hunyuan_v1_dense"),
        "HunYuanMoEV1ForCausalLM": Row("hunyuan_v1_moe"),
        "HyperCLOVAXForCausalLM": Row("hyperclovax"),
        "IQuestCoderForCausalLM": Row("iquestcoder", runs_as="LlamaForCausalLM"),
        "Idefics3ForConditionalGeneration": Row("towers", "IDEFICS3"),
        "InternLM3ForCausalLM": Row("internlm3", runs_as="LlamaForCausalLM"),
        "InternVLForConditionalGeneration": Row("towers", "INTERNVL"),
        "Jais2ForCausalLM": Row("jais2"),
        "Lfm2ForCausalLM": Row("lfm2"),
        "Lfm2MoeForCausalLM": Row("lfm2_moe"),
        "Llama4ForCausalLM": Row("llama4"),
        "Llama4ForConditionalGeneration": Row("llama4", "MULTIMODAL_FAMILY"),
        "LlamaForCausalLM": Row("llama"),
        "LlavaForConditionalGeneration": Row("towers", "LLAVA"),
        "LlavaNextForConditionalGeneration": Row("towers", "LLAVA_NEXT"),
        "LlavaOnevisionForConditionalGeneration": Row("towers", "LLAVA_ONEVISION"),
        "MellumForCausalLM": Row("mellum"),
        "MiniMaxM2ForCausalLM": Row("minimax_m2"),
        "Ministral3ForCausalLM": Row("ministral3"),
        "MinistralForCausalLM": Row("ministral"),
        "Mistral3ForConditionalGeneration": Row("mistral3"),
        "MistralForCausalLM": Row("mistral"),
        "MixtralForCausalLM": Row("mixtral"),
        "NemotronForCausalLM": Row("nemotron"),
        "Olmo2ForCausalLM": Row("olmo2"),
        "Olmo3ForCausalLM": Row("olmo3"),
        "OlmoForCausalLM": Row("olmo"),
        "OlmoHybridForCausalLM": Row("olmo_hybrid"),
        "OlmoeForCausalLM": Row("olmoe"),
        "Phi3ForCausalLM": Row("phi3"),
        "Qwen2ForCausalLM": Row("qwen2"),
        "Qwen2MoeForCausalLM": Row("qwen2_moe"),
        "Qwen2VLForConditionalGeneration": Row("qwen2_vl"),
        "Qwen2_5_VLForConditionalGeneration": Row("qwen2_5_vl"),
        "Qwen3ForCausalLM": Row("qwen3"),
        "Qwen3MoeForCausalLM": Row("qwen3_moe"),
        "Qwen3NextForCausalLM": Row("qwen3_next"),
        "Qwen3VLForConditionalGeneration": Row("qwen3_vl"),
        "Qwen3VLMoeForConditionalGeneration": Row("qwen3_vl_moe"),
        "Qwen3_5ForCausalLM": Row("qwen3_5"),
        "Qwen3_5ForConditionalGeneration": Row("qwen3_5", "MULTIMODAL_FAMILY", runs_as="Qwen3_5ForCausalLM"),
        "Qwen3_5MoeForCausalLM": Row("qwen3_5", "MOE_FAMILY"),
        "Qwen3_5MoeForConditionalGeneration": Row("qwen3_5", "MULTIMODAL_MOE_FAMILY", runs_as="Qwen3_5MoeForCausalLM"),
        "SarvamMLAForCausalLM": Row("sarvam_mla", runs_as="DeepseekV3ForCausalLM"),
        "SarvamMoEForCausalLM": Row("sarvam_moe", runs_as="Glm4MoeForCausalLM"),
        "SeedOssForCausalLM": Row("seed_oss"),
        "SmolLM3ForCausalLM": Row("smollm3"),
        "SmolVLMForConditionalGeneration": Row("towers", "SMOLVLM"),
        "SolarOpenForCausalLM": Row("solar_open"),
        "StableLmForCausalLM": Row("stablelm"),
        "Starcoder2ForCausalLM": Row("starcoder2"),
        "VaultGemmaForCausalLM": Row("vaultgemma"),
        "YoutuForCausalLM": Row("youtu"),
    }
)
