"""Mistral Small 3.1 and 3.2, Ministral 3: the text model of checkpoints with an image encoder."""

from minisgl_backend.models.families import ministral3, mistral
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.eyes import mistral3_vision
from minisgl_backend.models.families.gemma3 import MULTIMODAL_FAMILY as GEMMA3


def read(keys: Keys) -> DecoderConfig:
    families = {family.model_type: family for family in (mistral.FAMILY, ministral3.FAMILY)}
    family = families[keys.choice("model_type", tuple(families))]
    return family.read(keys.with_defaults(family.defaults))


FAMILY = Family(
    model_type="mistral3",
    read=read,
    text_config="text_config",
    tensor_names=GEMMA3.tensor_names,
    encoder=mistral3_vision,
)
