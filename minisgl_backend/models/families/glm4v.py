"""GLM-4.1V: GLM-4 (0414) with a position for each axis of an image, and a bias on queries, keys and values."""

from minisgl_backend.models.families import glm4
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, head_size, mlp, norm, uniform
from minisgl_backend.models.families.eyes import tower
from minisgl_backend.models.families.qwen2_vl import TEXT_NAMES


def read(keys: Keys) -> DecoderConfig:
    rope = read_rope(keys, head_size(keys), partial=True, interleaved=True, mrope="in sections")
    return uniform(keys, attention(keys, qkv_bias=True, rope=rope), mlp(keys), norm(keys, eps=1e-5), norms="both")


FAMILY = Family(
    model_type="glm4v",
    read=read,
    defaults={"num_key_value_heads": 2},
    text_config="text_config",
    tensor_names=TensorNames(
        stored=glm4.FAMILY.tensor_names.stored, prefixes=TEXT_NAMES.prefixes, left_out=TEXT_NAMES.left_out
    ),
    encoder=tower,
)
