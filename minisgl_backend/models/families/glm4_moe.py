"""GLM-4.5, 4.6 and 4.7: sigmoid routing and a shared expert; rope over half of each head."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames, read_rope
from minisgl_backend.models.families.common import attention, decoder, head_size, mlps, norm


def read(keys: Keys) -> DecoderConfig:
    head_dim = head_size(keys)
    heads = attention(
        keys,
        qkv_bias=keys.boolean("attention_bias", False),
        rope=read_rope(keys, head_dim, partial=True, part=0.5),
        qk_norm=norm(keys, eps=1e-5) if keys.boolean("use_qk_norm", False) else None,
    )
    layers = [LayerConfig(mixer=heads, mlp=one, norm=norm(keys, eps=1e-5)) for one in mlps(keys, dense=1)]
    return decoder(keys, layers, num_draft_layers=keys.integer("num_nextn_predict_layers", 1, least=0))


FAMILY = Family(model_type="glm4_moe", read=read, tensor_names=TensorNames(stored=SHARED_EXPERTS))
