"""Families that see by towers of transformers' own, around decoders of other families: LLaVA and those like it,
InternVL, Idefics3, SmolVLM. GLM-4.1V has a decoder of its own."""

from __future__ import annotations

from types import MappingProxyType

from minisgl_backend.models.families import llama, qwen2
from minisgl_backend.models.families.base import Family, TensorNames
from minisgl_backend.models.families.eyes import tower

_TEXTS = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "granite": "GraniteForCausalLM",
    }
)
_LLAVA = TensorNames(  # with the names of transformers 4 and 5
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    left_out=tuple(
        f"{prefix}{name}"
        for prefix in ("", "model.")
        for name in ("vision_tower.", "multi_modal_projector.", "image_newline")
    ),
)
_IDEFICS = TensorNames(
    prefixes=(("model.text_model.", "model."),), left_out=("model.vision_model.", "model.connector.")
)


def _family(model_type: str, names: TensorNames = _LLAVA, first: Family = llama.FAMILY) -> Family:
    """`first`: the decoder where config.json does not name its type."""
    return Family(
        model_type=model_type,
        read=first.read,
        texts={first.model_type: _TEXTS[first.model_type], **_TEXTS},
        text_config="text_config",
        tensor_names=names,
        encoder=tower,
    )


IDEFICS3 = _family("idefics3", _IDEFICS)
INTERNVL = _family("internvl", first=qwen2.FAMILY)
LLAVA = _family("llava")
LLAVA_NEXT = _family("llava_next")
LLAVA_ONEVISION = _family("llava_onevision", first=qwen2.FAMILY)
SMOLVLM = _family("smolvlm", _IDEFICS)
