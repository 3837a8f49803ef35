"""Sarvam 30B: GLM-4.5's layers, with rope over whole heads."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, Stored, TensorNames
from minisgl_backend.models.families.common import attention, decoder, mlps, norm
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    heads = attention(
        keys,
        qkv_bias=keys.boolean("attention_bias", keys.boolean("use_qkv_bias", False)),
        rope=read_rope(keys, keys.integer("head_dim"), partial=True),
        qk_norm=norm(keys) if keys.boolean("use_qk_norm", True) else None,
    )
    layers = [LayerConfig(mixer=heads, mlp=one, norm=norm(keys)) for one in mlps(keys, dense=1)]
    drafts = keys.integer("num_nextn_predict_layers", keys.integer("num_mtp_layers", 0, least=0), least=0)
    return decoder(keys, layers, num_draft_layers=drafts)


_NAMES = {
    "attention.dense": ("self_attn.o_proj",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.query_layernorm": ("self_attn.q_norm",),
    "attention.key_layernorm": ("self_attn.k_norm",),
    "mlp.gate.expert_bias": ("mlp.gate.e_score_correction_bias",),
}

FAMILY = Family(
    model_type="sarvam_moe",
    read=read,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_theta": 8_000_000.0,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
    },
    tensor_names=TensorNames(
        stored=(*SHARED_EXPERTS, *(Stored(name=theirs, of=ours) for theirs, ours in _NAMES.items())),
        prefixes=(("model.word_embeddings.", "model.embed_tokens."),),
    ),
)
