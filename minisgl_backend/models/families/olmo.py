"""OLMo, the first: Llama with a LayerNorm that has no weights."""

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import llama_attention, mlp, uniform


def read(keys: Keys) -> DecoderConfig:
    if (clip := keys.get("clip_qkv")) is not None:
        refuse("clip_qkv", clip, "null")
    return uniform(keys, llama_attention(keys), mlp(keys), NormConfig(eps=1e-5, kind="layer", weight=False))


FAMILY = Family(model_type="olmo", read=read)
