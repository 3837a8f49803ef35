"""Readers that most families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl_backend.layers.config import (
    Activation,
    DenseMlpConfig,
    LayerConfig,
    MlpConfig,
    MoeConfig,
    Norms,
    RouterConfig,
    UngatedActivation,
    UngatedMlpConfig,
)
from minisgl_backend.layers.mixer_config import AttentionConfig, MixerConfig, NormConfig, RopeConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Keys, read_rope, refuse
from minisgl_backend.models.rope import longest, max_positions

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def attention(keys: Keys, kind: type[AttentionConfig] = AttentionConfig, **more: Any) -> AttentionConfig:
    """Self-attention of this kind with sizes and rope under their usual names; `more`: other fields. Its `num_kv_heads`
    and `head_dim` are defaults for absent keys, its `rope` replaces the usual reader's, and its `bias` is that of all
    projections."""
    if "bias" in more:
        more["qkv_bias"] = more["output_bias"] = more.pop("bias")
    num_q_heads = keys.integer("num_attention_heads")
    head_dim = more.pop("head_dim", None) or keys.integer("hidden_size") // num_q_heads
    head_dim = keys.integer("head_dim", head_dim)
    return kind(
        num_q_heads=num_q_heads,
        num_kv_heads=keys.integer("num_key_value_heads", more.pop("num_kv_heads", None)),
        head_dim=head_dim,
        rope=more.pop("rope") if "rope" in more else read_rope(keys, head_dim),
        **more,
    )


def llama_attention(keys: Keys, kind: type[AttentionConfig] = AttentionConfig, **more: Any) -> AttentionConfig:
    """`attention` as Llama's: attention_bias is that of all projections, an absent num_key_value_heads means as many as
    query heads."""
    bias, num_heads = keys.boolean("attention_bias", False), keys.integer("num_attention_heads")
    return attention(keys, kind, num_kv_heads=num_heads, bias=bias, **more)


def head_size(keys: Keys) -> int:
    """head_dim, or where it is absent that of heads that make up the hidden size."""
    return keys.integer("head_dim", keys.integer("hidden_size") // keys.integer("num_attention_heads"))


def mlp(keys: Keys, activation_key: str = "hidden_act", *, bias: bool = False) -> MlpConfig:
    """The dense MLP."""
    return MlpConfig(
        intermediate_size=keys.integer("intermediate_size"), activation=activation(keys, activation_key), bias=bias
    )


def activation(keys: Keys, key: str = "hidden_act") -> Activation:
    """Of gated MLPs."""
    return _ACTIVATIONS[keys.choice(key, tuple(_ACTIVATIONS))]


def ungated_mlp(keys: Keys, default: str, *, bias: bool) -> UngatedMlpConfig:
    """The dense MLP without a gate; `default`: of hidden_act."""
    activations: Mapping[str, UngatedActivation] = {
        "silu": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "relu2": "relu2",
    }
    return UngatedMlpConfig(
        intermediate_size=keys.integer("intermediate_size"),
        activation=activations[keys.choice("hidden_act", tuple(activations), default)],
        bias=bias,
    )


def norm(keys: Keys, eps: float = 1e-6, **more: Any) -> NormConfig:
    """RMSNorm; `eps`: default for an absent key."""
    return NormConfig(eps=keys.number("rms_norm_eps", eps), **more)


def decoder(keys: Keys, layers: Sequence[LayerConfig], **more: Any) -> DecoderConfig:
    """Vocabulary, hidden size, context and tied weights under their usual names; the final norm as in the layers."""
    ropes = [layer.mixer.rope for layer in layers]
    return DecoderConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=tuple(layers),
        norm=layers[0].norm,
        max_position=longest(keys, ropes),
        default_length=max_positions(keys) if any(rope and rope.type == "dynamic" for rope in ropes) else None,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
        **more,
    )


def uniform(
    keys: Keys,
    mixer: MixerConfig,
    mlp: DenseMlpConfig | MoeConfig,
    norm: NormConfig,
    *,
    norms: Norms = "before",
    residual_multiplier: float = 1.0,
    **more: Any,
) -> DecoderConfig:
    """`decoder` of layers that are alike."""
    layer = LayerConfig(mixer=mixer, mlp=mlp, norm=norm, norms=norms, residual_multiplier=residual_multiplier)
    return decoder(keys, [layer] * keys.integer("num_hidden_layers"), **more)


def layer_types(
    keys: Keys, num_layers: int, allowed: Sequence[str] = (FULL, SLIDING), key: str = "layer_types"
) -> tuple[str, ...]:
    """One of `allowed` for each layer; () where the key is absent."""
    types = keys.sequence(key)
    for layer_type in types:
        if layer_type not in allowed:
            refuse(key, layer_type, ", ".join(allowed))
    if len(types) not in (0, num_layers):
        refuse(key, types, f"null, or one entry for each of the {num_layers} layers")
    return tuple(types)


def every(pattern: int, num_layers: int) -> tuple[str, ...]:
    """Layer types: full attention in every `pattern`-th layer, a window in the others."""
    return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))


def window(keys: Keys, default: int | None) -> int | None:
    """`sliding_window` in tokens; an explicit null means none. It may be longer than any sequence (`outgrows`)."""
    value = keys.get("sliding_window", None if keys.has("sliding_window") else default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse("sliding_window", value, "null or an integer, 1 or more")
    return value


def check_window(size: int | None, types: Sequence[str]) -> None:
    """Layers with a window need its `size`."""
    if size is None and SLIDING in types:
        refuse("sliding_window", size, f"an integer, 1 or more, as layer_types has {SLIDING}")


def outgrows(keys: Keys, rope: RopeConfig | None, size: int | None) -> bool:
    """Whether sequences can be longer than the window `size`; `rope` may stretch the context."""
    return size is not None and size < longest(keys, [rope])


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


def expert_counts(
    keys: Keys, key: str, default: int, per_token_key: str = "num_experts_per_tok", per_token: int | None = None
) -> tuple[int, int]:
    """The number of experts, and how many a token takes; `default` and `per_token` are for absent keys."""
    num_experts, experts_per_token = keys.integer(key, default), keys.integer(per_token_key, per_token)
    if experts_per_token > num_experts:
        refuse(per_token_key, experts_per_token, f"1 to {key} ({num_experts})")
    return num_experts, experts_per_token


def mixtral_experts(keys: Keys) -> MoeConfig:
    """Experts without others beside them, weighted by a softmax over the best logits only."""
    num_experts, experts_per_token = expert_counts(keys, "num_local_experts", 8, per_token=2)
    keys.choice("hidden_act", ("silu",))
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer("intermediate_size"),
        router=RouterConfig(renormalize=True),
    )
