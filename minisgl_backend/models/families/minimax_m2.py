"""MiniMax-M2: RMSNorm over all heads together, partial rope, sigmoid routing."""

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, read_rope, refuse
from minisgl_backend.models.families.common import attention, decoder, expert_counts, norm
from minisgl_backend.models.families.mixtral import experts_stored


def read(keys: Keys) -> DecoderConfig:
    _check_released_keys(keys)
    head_dim = keys.integer("head_dim")
    rotary_dim = keys.integer("rotary_dim", head_dim)
    if rotary_dim > head_dim:
        refuse("rotary_dim", rotary_dim, f"1 to head_dim ({head_dim})")
    num_experts, experts_per_token = expert_counts(keys, "num_local_experts", 256, per_token=8)
    keys.choice("hidden_act", ("silu",))
    layer = LayerConfig(
        mixer=attention(
            keys,
            NormOverHeadsAttentionConfig,
            rope=read_rope(keys, head_dim, partial=True, part=rotary_dim / head_dim),
            qk_norm=norm(keys),
        ),
        mlp=MoeConfig(
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            intermediate_size=keys.integer("intermediate_size"),
            router=RouterConfig(scores="sigmoid", correction_bias=True),
        ),
        norm=norm(keys),
    )
    num_draft_layers = keys.integer("num_mtp_modules", 0, least=0)
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"), num_draft_layers=num_draft_layers)


def _check_released_keys(keys: Keys) -> None:
    """Keys of the released config.json whose values transformers' class assumes."""
    keys.choice("use_qk_norm", (True,))
    keys.choice("qk_norm_type", ("per_layer",))
    keys.choice("scoring_func", ("sigmoid",))
    keys.choice("use_routing_bias", (True,))
    keys.choice("shared_intermediate_size", (0,))
    keys.choice("layernorm_full_attention_beta", (1.0,))
    keys.choice("layernorm_mlp_beta", (1.0,))
    types = keys.sequence("attn_type_list")
    if any(kind != 1 for kind in types):
        refuse("attn_type_list", types, "1, full attention, for every layer")
    keys.without_effect("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode", "use_mtp")
    keys.without_effect("mtp_transformer_layers")


FAMILY = Family(
    model_type="minimax_m2",
    read=read,
    defaults={"head_dim": 128, "rope_theta": 5_000_000.0},
    tensor_names=TensorNames(
        stored=(
            Stored(name="block_sparse_moe.e_score_correction_bias", of=("mlp.gate.e_score_correction_bias",)),
            *experts_stored(),
        )
    ),
)
