"""The families that see, by model_type. Another one: its file here, its row below, and its encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.images.families.gemma import Gemma3
from minisgl_backend.images.families.gemma4 import Gemma4
from minisgl_backend.images.families.idefics import Idefics3
from minisgl_backend.images.families.internvl import InternVL
from minisgl_backend.images.families.llava import Llava, LlavaNext
from minisgl_backend.images.families.pixtral import Pixtral
from minisgl_backend.images.families.qwen_vl import Glm4V, QwenVL
from minisgl_backend.images.family import Family
from minisgl_backend.images.processor_files import read_processor

FAMILIES: Mapping[str, type[Family]] = {
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "glm46v": Glm4V,
    "glm4v": Glm4V,
    "glm4v_moe": Glm4V,
    "idefics3": Idefics3,
    "internvl": InternVL,
    "llava": Llava,
    "llava_next": LlavaNext,
    "llava_onevision": LlavaNext,
    "mistral3": Pixtral,
    "qwen2_5_vl": QwenVL,
    "qwen2_vl": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "smolvlm": Idefics3,
}


def family_of(model_dir: str | Path) -> Family:
    """The family of a model folder. Raises ConfigError, with the list, if its images are not served."""
    files = read_processor(model_dir)
    model_type = files.config.get("model_type")
    found = FAMILIES.get(str(model_type))
    if found is Llava and files.vision.get("model_type") == "pixtral":
        found = Pixtral
    if found is None:
        raise ConfigError(
            f"images are not served with model_type {model_type!r} in config.json; allowed: {', '.join(FAMILIES)}"
        )
    if not files.image:
        raise ConfigError(f"{model_dir} has no preprocessor_config.json; its images cannot be prepared without one")
    try:
        return found.read(files)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"the processor's files in {model_dir} cannot be read: {error}") from None


def why_blind(model_dir: str | Path, why_not: str) -> str:
    """`why_not` of a model whose images are not served; of a family whose images never are, although config.json has an
    encoder, the list of those that are in its place."""
    try:
        has_encoder = bool(read_processor(model_dir).vision)
    except ConfigError:  # a .gguf file, or one that is refused elsewhere
        return why_not
    if why_not or has_encoder:
        try:
            family_of(model_dir)
        except ConfigError as error:
            return str(error)
    return why_not
