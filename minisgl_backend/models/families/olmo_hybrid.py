"""OLMo hybrid: the gated delta rule in three of four layers, with norms before its sublayers; OLMo 2's layers, mostly
without rotation, in the others."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormConfig, NormOverHeadsAttentionConfig
from minisgl_backend.models.families.base import (
    FULL,
    DecoderConfig,
    Family,
    Keys,
    Stored,
    TensorNames,
    read_rope,
)
from minisgl_backend.models.families.common import attention, decoder, head_size, mlp, norm
from minisgl_backend.models.families.delta import CONVOLUTION, gated_delta, hybrid_types


def read(keys: Keys) -> DecoderConfig:
    num_heads = keys.integer("num_attention_heads")
    around = norm(keys)
    full = attention(
        keys,
        NormOverHeadsAttentionConfig,
        num_kv_heads=num_heads,
        rope=read_rope(keys, head_size(keys)) if _is_rotated(keys) else None,
        bias=keys.boolean("attention_bias", False),
        qk_norm=around,
    )
    linear = gated_delta(
        keys,
        NormConfig(eps=1e-5),
        num_heads=num_heads,
        beta_scale=2.0 if keys.boolean("linear_allow_neg_eigval", True) else 1.0,
    )
    types, dense = hybrid_types(keys), mlp(keys)
    layers = [
        LayerConfig(mixer=full, mlp=dense, norm=around, norms="after")
        if kind == FULL
        else LayerConfig(mixer=linear, mlp=dense, norm=around)
        for kind in types
    ]
    return decoder(keys, layers)


def _is_rotated(keys: Keys) -> bool:
    """Unless rope_parameters, or rope_theta, is null: so released models say that they have no positions. (transformers
    has a default for the former since 5.24.)"""
    if keys.has("rope_parameters") and keys.get("rope_parameters") is None:
        return False
    of_rope = keys.mapping("rope_parameters")
    told = "rope_theta" in of_rope or keys.has("rope_theta")
    return not told or of_rope.get("rope_theta", keys.get("rope_theta")) is not None


def _renamed(of: str, *pairs: tuple[str, str]) -> tuple[Stored, ...]:
    """Modules of `of`: names in checkpoints, and here."""
    return tuple(Stored(name=f"{of}{theirs}", of=(f"{of}{ours}",), may_be_absent=True) for theirs, ours in pairs)


FAMILY = Family(
    model_type="olmo_hybrid",
    read=read,
    defaults={"rms_norm_eps": 1e-6},
    tensor_names=TensorNames(
        stored=(
            CONVOLUTION,
            *_renamed(
                "linear_attn.",
                *((f"{theirs}_proj", f"in_proj_{ours}") for theirs, ours in zip("qkvgba", "qkvzba", strict=True)),
                ("o_proj", "out_proj"),
                ("o_norm", "norm"),
            ),
            # Of its layers with a state; files of transformers have the second in all layers.
            *_renamed(
                "", ("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")
            ),
        )
    ),
)
