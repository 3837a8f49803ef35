"""DeepSeek-V2 and V2-Lite: latent attention (MLA), experts chosen by softmax within the best groups.

DeepSeek-AI, 2024: DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model.
"""

import math

from minisgl_backend.layers.config import LayerConfig, MoeConfig, RouterConfig
from minisgl_backend.layers.mixer_config import LatentAttentionConfig, NormConfig, RopeConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, DecoderConfig, Family, Keys, TensorNames, refuse
from minisgl_backend.models.families.common import activation, decoder, mlp, norm
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    keys.choice("mlp_bias", (False,))
    keys.choice("moe_layer_freq", (1,))
    keys.without_effect("aux_loss_alpha", "ep_size", "seq_aux")  # for training, and for the authors' own serving code
    attention = latent_attention(keys, interleaved=True)
    num_dense, dense, mixture = keys.integer("first_k_dense_replace", 0, least=0), mlp(keys), _mixture(keys)
    layers = [
        LayerConfig(mixer=attention, mlp=dense if layer < num_dense else mixture, norm=norm(keys))
        for layer in range(keys.integer("num_hidden_layers"))
    ]
    return decoder(keys, layers)


def latent_attention(keys: Keys, *, interleaved: bool) -> LatentAttentionConfig:
    """interleaved: as in RopeConfig."""
    num_heads, rope_dim = keys.integer("num_attention_heads"), keys.integer("qk_rope_head_dim")
    keys.choice("num_key_value_heads", (num_heads,))
    keys.without_effect("head_dim", "qk_head_dim")  # transformers computes both
    nope_dim, rope = keys.integer("qk_nope_head_dim"), read_rope(keys, rope_dim, interleaved=interleaved)
    if rope_dim % 2:
        refuse("qk_rope_head_dim", rope_dim, "an even number")
    q_lora_rank = keys.get("q_lora_rank")
    bias = keys.boolean("attention_bias", False)
    if q_lora_rank is None and bias:
        refuse("attention_bias", bias, "false where q_lora_rank is null")
    return LatentAttentionConfig(
        num_q_heads=num_heads,
        q_lora_rank=None if q_lora_rank is None else keys.integer("q_lora_rank"),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=keys.integer("v_head_dim"),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * _temperature(rope),
        norm=NormConfig(eps=1e-6),  # whatever rms_norm_eps is
        bias=bias,
    )


def _temperature(rope: RopeConfig) -> float:
    """YaRN's temperature (Peng et al., 2023), where it scales the whole scores and not only the rotated dimensions."""
    if not rope.mscale_all_dim or rope.factor <= 1.0:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _mixture(keys: Keys) -> MoeConfig:
    num_experts, groups, groups_per_token = keys.integer("n_routed_experts"), 1, 1
    keys.choice("scoring_func", ("softmax",))
    keys.choice("norm_topk_prob", (False,))
    if keys.choice("topk_method", ("greedy", "group_limited_greedy")) == "greedy":
        keys.without_effect("n_group", "topk_group")
    else:
        groups, groups_per_token = keys.integer("n_group"), keys.integer("topk_group")
    if num_experts % groups:
        refuse("n_group", groups, f"a divisor of n_routed_experts ({num_experts})")
    if groups_per_token > groups:
        refuse("topk_group", groups_per_token, f"1 to n_group ({groups})")
    experts_per_token = keys.integer("num_experts_per_tok", 6)  # of both published models; transformers has no default
    most = num_experts // groups * groups_per_token
    if experts_per_token > most:
        refuse("num_experts_per_tok", experts_per_token, f"1 to {most}, the experts that a token may take")
    size, scaling = keys.integer("moe_intermediate_size"), keys.number("routed_scaling_factor", 1.0)
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=size,
        activation=activation(keys),
        router=RouterConfig(
            renormalize=False,
            num_groups=groups,
            groups_per_token=groups_per_token,
            scaling=scaling,
            # Otherwise the experts' kernels include the router, whose weights no checkpoint has in float32.
            in_float32=groups > 1 or scaling != 1.0,
        ),
        shared_intermediate_size=size * keys.integer("n_shared_experts", least=0),
    )


SIZES = {  # of the heads of both models
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILY = Family(
    model_type="deepseek_v2",
    read=read,
    defaults={
        **SIZES,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    tensor_names=TensorNames(stored=SHARED_EXPERTS),
)
