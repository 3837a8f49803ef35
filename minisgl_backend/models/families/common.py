"""Definition of a family, and readers that most families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend.layers.config import Activation, LayerConfig, MlpConfig, UngatedActivation, UngatedMlpConfig
from minisgl_backend.layers.mixer_config import AttentionConfig, NormConfig, RopeConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.keys import Keys, refuse
from minisgl_backend.models.rope import longest, max_positions, read_rope
from minisgl_backend.weights.names import TensorNames

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"  # entries of layer_types


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture. `read` reads every key that changes what is computed, and refuses unsupported values;
    `known_keys.check_unread` checks the keys that it does not read."""

    model_type: str  # its name in transformers
    read: Callable[[Keys], DecoderConfig]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' defaults of keys that its configs omit
    text_config: str | None = None  # key of the text model's config inside config.json; None: config.json itself
    may_be_flat: bool = False  # older configs have no `text_config`, but its keys at the top level
    tensor_names: TensorNames = field(default_factory=TensorNames)


def attention(keys: Keys, kind: type[AttentionConfig] = AttentionConfig, **more: Any) -> AttentionConfig:
    """Self-attention of this kind with sizes and rope under their usual names; `more`: other fields. Its `num_kv_heads`
    and `head_dim` are defaults for absent keys, its `rope` replaces the usual reader's."""
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
