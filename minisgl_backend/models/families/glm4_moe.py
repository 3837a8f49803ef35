"""GLM-4.5, 4.6 and 4.7: sigmoid routing and a shared expert; rope over half of each head."""

from __future__ import annotations

from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig, RouterConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families.common import Family, activation, attention, decoder, mlp, norm
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.models.rope import read_rope
from minisgl_backend.weights.names import SHARED_EXPERTS, TensorNames


def read(keys: Keys) -> DecoderConfig:
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))
    heads = attention(
        keys,
        qkv_bias=keys.boolean("attention_bias", False),
        rope=read_rope(keys, head_dim, partial=True, part=0.5),
        qk_norm=norm(keys, eps=1e-5) if keys.boolean("use_qk_norm", False) else None,
    )
    layers = [LayerConfig(mixer=heads, mlp=one, norm=norm(keys, eps=1e-5)) for one in mlps(keys, dense=1)]
    return decoder(keys, layers, num_draft_layers=keys.integer("num_nextn_predict_layers", 1, least=0))


def mlps(keys: Keys, dense: int, *, norm_topk_prob: bool = True) -> list[MlpConfig | MoeConfig]:
    """Dense MLPs in the first layers, then mixtures; `dense`: default of first_k_dense_replace."""
    num_dense = keys.integer("first_k_dense_replace", dense, least=0)
    mixture = routed_experts(keys, norm_topk_prob=norm_topk_prob)
    return [mlp(keys) if layer < num_dense else mixture for layer in range(keys.integer("num_hidden_layers"))]


def routed_experts(
    keys: Keys,
    *,
    count_key: str = "n_routed_experts",
    shared_key: str = "n_shared_experts",
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> MoeConfig:
    """Mixtures with the router of DeepSeek-V3 (DeepSeek-AI, 2024). count_key, shared_key: of the numbers of experts;
    norm_topk_prob, scaling: defaults of absent keys."""
    num_experts, num_groups = keys.integer(count_key), keys.integer("n_group", 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        refuse("n_group", num_groups, f"a divisor of {count_key} ({num_experts}), for 2 experts or more in each")
    groups_per_token = keys.integer("topk_group", 1)
    if groups_per_token > num_groups:
        refuse("topk_group", groups_per_token, f"1 to n_group ({num_groups})")
    experts_per_token, most = keys.integer("num_experts_per_tok"), num_experts // num_groups * groups_per_token
    if experts_per_token > most:
        refuse(
            "num_experts_per_tok", experts_per_token, f"1 to {most}, the experts in topk_group of the n_group groups"
        )
    keys.choice("scoring_func", ("sigmoid", "noaux_tc"))  # the second in dots.llm1's files, for the same scores
    keys.choice("topk_method", ("noaux_tc",))
    size = keys.integer("moe_intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=size,
        activation=activation(keys),
        router=RouterConfig(
            scores="sigmoid",
            renormalize=keys.boolean("norm_topk_prob", norm_topk_prob),
            correction_bias=True,
            num_groups=num_groups,
            groups_per_token=groups_per_token,
            scaling=keys.number("routed_scaling_factor", scaling),
            in_float32=True,
        ),
        shared_intermediate_size=size * keys.integer(shared_key, 1, least=0),
    )


FAMILY = Family(model_type="glm4_moe", read=read, tensor_names=TensorNames(stored=SHARED_EXPERTS))
