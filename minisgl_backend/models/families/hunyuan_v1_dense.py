"""Hunyuan 0.5B to 7B: Llama with head norms after the rotation, and a theta scaled by a fixed alpha."""

from minisgl_backend.layers.mixer_config import AttentionConfig, NormBehindRopeAttentionConfig, RopeConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys, Stored, TensorNames, is_positive, refuse
from minisgl_backend.models.families.common import attention, mlp, norm, uniform
from minisgl_backend.models.rope import read_rope


def read(keys: Keys) -> DecoderConfig:
    keys.choice("num_experts", (1,))
    return uniform(keys, hunyuan_attention(keys), mlp(keys), norm(keys, eps=1e-5))


def hunyuan_attention(keys: Keys) -> AttentionConfig:
    _check_released_keys(keys)
    num_heads, bias = keys.integer("num_attention_heads"), keys.boolean("attention_bias", False)
    head_dim = keys.integer("head_dim", keys.integer("hidden_size") // num_heads)
    return attention(
        keys,
        NormBehindRopeAttentionConfig,
        num_kv_heads=num_heads,
        qkv_bias=bias,
        output_bias=bias,
        rope=_rope(keys, head_dim),
        qk_norm=norm(keys, eps=1e-5),
    )


def _rope(keys: Keys, head_dim: int) -> RopeConfig:
    """With `alpha` a rope of type dynamic is not dynamic: the theta is scaled by a constant, and no other value of
    rope_parameters counts."""
    given = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    alpha = given.get("alpha")
    if not alpha or given.get("rope_type", given.get("type")) != "dynamic":
        return read_rope(keys, head_dim)
    theta = given.get("rope_theta") or keys.number("rope_theta", 10_000.0)
    for key, value in (("rope_theta", theta), ("alpha", alpha)):
        if not is_positive(value):
            refuse(key, value, "a number above 0")
    return RopeConfig(theta=theta * alpha ** (head_dim / (head_dim - 2)))


def _check_released_keys(keys: Keys) -> None:
    """Keys of the released config.json whose values transformers' class assumes."""
    keys.choice("use_qk_norm", (True,))
    keys.choice("use_cla", (False,))
    keys.choice("use_mla", (False,))
    keys.choice("norm_type", ("rms",))
    keys.choice("mlp_bias", (False,))
    keys.choice("group_limited_greedy", (False,))
    keys.without_effect("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of MLA
    keys.without_effect("n_group", "topk_group", "routed_scaling_factor", "cla_share_factor", "attention_head_dim")


HEAD_NORMS = (
    Stored(name="self_attn.query_layernorm", of=("self_attn.q_norm",)),
    Stored(name="self_attn.key_layernorm", of=("self_attn.k_norm",)),
)

FAMILY = Family(model_type="hunyuan_v1_dense", read=read, tensor_names=TensorNames(stored=HEAD_NORMS))
