"""GLM-4.1V: GLM-4 (0414) with a position for each axis of an image, and a bias on queries, keys and values. GLM-4.5V:
the same of GLM-4.5. GLM-4.6V: either of them."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families import glm4, glm4_moe
from minisgl_backend.models.families.base import MERGED_EXPERTS, DecoderConfig, Family, Keys, read_rope
from minisgl_backend.models.families.common import attention, decoder, head_size, mlp, mlps, norm, uniform
from minisgl_backend.models.families.eyes import tower
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES


def read(keys: Keys) -> DecoderConfig:
    rope = read_rope(keys, head_size(keys), partial=True, interleaved=True, mrope="in sections")
    return uniform(keys, attention(keys, qkv_bias=True, rope=rope), mlp(keys), norm(keys, eps=1e-5), norms="both")


def read_moe(keys: Keys) -> DecoderConfig:
    rope = read_rope(keys, head_size(keys), partial=True, part=0.5, mrope="in sections")
    heads = attention(keys, qkv_bias=keys.boolean("attention_bias", True), rope=rope)
    layers = [LayerConfig(mixer=heads, mlp=one, norm=norm(keys, eps=1e-5)) for one in mlps(keys, dense=1)]
    return decoder(keys, layers)


FAMILY = Family(
    model_type="glm4v",
    read=read,
    defaults={"num_key_value_heads": 2},
    text_config="text_config",
    tensor_names=replace(TEXT_NAMES, stored=glm4.FAMILY.tensor_names.stored),
    encoder=tower,
)
MOE_FAMILY = replace(
    FAMILY,
    model_type="glm4v_moe",
    read=read_moe,
    defaults={"num_key_value_heads": 8},
    tensor_names=replace(TEXT_NAMES, stored=(*glm4_moe.FAMILY.tensor_names.stored, *MERGED_EXPERTS)),
)
FAMILY_46 = replace(
    FAMILY,
    model_type="glm46v",
    texts={"glm4v_text": "Glm4vForConditionalGeneration", "glm4v_moe_text": "Glm4vMoeForConditionalGeneration"},
)
