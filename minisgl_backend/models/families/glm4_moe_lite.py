"""GLM-4.7-Flash: the attention and the mixtures of DeepSeek-V3."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames, refuse
from minisgl_backend.models.families.common import decoder, mlp, norm, routed_experts
from minisgl_backend.models.families.deepseek_v2 import latent_attention

_DENSE, _SPARSE = "dense", "sparse"


def read(keys: Keys) -> DecoderConfig:
    attention = latent_attention(keys, interleaved=keys.boolean("rope_interleave", True))
    dense, sparse = mlp(keys), routed_experts(keys, scaling=1.8)
    layers = [
        LayerConfig(mixer=attention, mlp=dense if kind == _DENSE else sparse, norm=norm(keys, eps=1e-5))
        for kind in _mlp_types(keys)
    ]
    return decoder(keys, layers, num_draft_layers=keys.integer("num_nextn_predict_layers", 1, least=0))


def _mlp_types(keys: Keys) -> list[str]:
    """MLP type of each layer. If the list is absent, first_k_dense_replace counts, which transformers does not read."""
    num_layers = keys.integer("num_hidden_layers")
    num_dense = keys.integer("first_k_dense_replace", 1, least=0)
    types = keys.get("mlp_layer_types") or [_DENSE if layer < num_dense else _SPARSE for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_DENSE, _SPARSE}:
        refuse("mlp_layer_types", types, f'"{_DENSE}" or "{_SPARSE}" for each of the {num_layers} layers')
    return list(types)


FAMILY = Family(
    model_type="glm4_moe_lite",
    read=read,
    defaults={
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
    },
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
