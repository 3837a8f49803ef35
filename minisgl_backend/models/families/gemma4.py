"""Gemma 4, text, of the size with dense layers and without per-layer embeddings (31B): norms of queries, keys and
values, another head size in layers without a window, a stored factor of the residual stream after each layer.

Other sizes run on transformers' code.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import RopeConfig, ValueNormAttentionConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, TensorNames, refuse
from minisgl_backend.models.families.common import check_window, decoder, every, layer_types, mlp, norm, window
from minisgl_backend.models.families.eyes import gemma4_vision
from minisgl_backend.models.rope import by_layer_type, make_rope

_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def read(keys: Keys) -> DecoderConfig:
    _check_kind(keys)
    num_layers, size = keys.integer("num_hidden_layers"), window(keys, 512)
    types = layer_types(keys, num_layers) or every(6, num_layers)
    types = (*types[:-1], FULL)  # as in transformers
    check_window(size, types)
    given = by_layer_type(keys, _ROPES)
    ropes = {kind: {**_ROPES[kind], **values} for kind, values in given.items()}
    sizes = _per_layer(keys, types)

    def layer(index: int, kind: str) -> LayerConfig:
        head_dim, num_kv_heads = sizes[index]
        return LayerConfig(
            mixer=ValueNormAttentionConfig(
                num_q_heads=keys.integer("num_attention_heads"),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rope=_rope(keys, ropes[kind], head_dim),
                window=size if kind == SLIDING else None,
                scale=1.0,
                qk_norm=norm(keys),
                value_norm_eps=norm(keys).eps,
                k_eq_v=kind == FULL and keys.boolean("attention_k_eq_v", False),
            ),
            mlp=mlp(keys, "hidden_activation"),
            norm=norm(keys),
            norms="both",
            layer_scalar=True,
        )

    return decoder(
        keys,
        [layer(index, kind) for index, kind in enumerate(types)],
        embedding_multiplier=math.sqrt(keys.integer("hidden_size")),
        logits_soft_cap=keys.optional_number("final_logit_softcapping"),
    )


def _check_kind(keys: Keys) -> None:
    """Refuses the additional features of smaller models and of those with experts."""
    keys.choice("hidden_size_per_layer_input", (0,))
    keys.choice("num_kv_shared_layers", (0,))
    keys.choice("enable_moe_block", (False,))
    keys.choice("attention_bias", (False,))
    keys.choice("use_bidirectional_attention", (None, "vision"))  # among the tokens of an image
    keys.without_effect("vocab_size_per_layer_input", "use_double_wide_mlp")
    keys.without_effect("num_experts", "top_k_experts", "moe_intermediate_size")


def _per_layer(keys: Keys, types: tuple[str, ...]) -> list[tuple[int, int]]:
    """(Head size, number of KV heads) of each layer: from `per_layer_config`, or one pair for all layers without a
    window."""
    head_dim, num_kv_heads = keys.integer("head_dim"), keys.integer("num_key_value_heads")
    full: Mapping[str, Any] = {"head_dim": keys.integer("global_head_dim", 512)}
    own_heads = keys.get("num_global_key_value_heads")
    if own_heads is not None and keys.boolean("attention_k_eq_v", False):
        full = {**full, "num_key_value_heads": own_heads}
    given = {int(name): one for name, one in keys.mapping("per_layer_config").items() if name.isdecimal()}
    if len(given) < len(keys.mapping("per_layer_config")) or not given.keys() <= set(range(len(types))):
        refuse(
            "per_layer_config", sorted(keys.mapping("per_layer_config")), f"numbers of layers, 0 to {len(types) - 1}"
        )
    overrides = [given.get(index, {}) if given else full if kind == FULL else {} for index, kind in enumerate(types)]
    found = []
    for one in overrides:
        of_layer = Keys({"head_dim": head_dim, "num_key_value_heads": num_kv_heads, **one})
        if more := set(one) - {"head_dim", "num_key_value_heads"}:
            refuse("per_layer_config", sorted(more), "head_dim and num_key_value_heads of a layer")
        found.append((of_layer.integer("head_dim"), of_layer.integer("num_key_value_heads")))
    return found


def _rope(keys: Keys, values: Mapping[str, Any], head_dim: int) -> RopeConfig:
    if values["rope_type"] != "proportional":
        own = {key: value for key, value in values.items() if key not in ("rope_theta", "partial_rotary_factor")}
        return make_rope(keys, own, values["rope_theta"], head_dim)
    part, theta, factor = (values.get(key, 1.0) for key in ("partial_rotary_factor", "rope_theta", "factor"))
    for key, value in (("partial_rotary_factor", part), ("rope_theta", theta), ("factor", factor)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            refuse(key, value, "a number above 0")
    return RopeConfig(
        type="proportional", theta=float(theta), factor=float(factor), rotated_pairs=int(part * head_dim // 2)
    )


_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
FAMILY = Family(model_type="gemma4_text", read=read, defaults=_DEFAULTS)

_ENCODERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")

# The text model of a checkpoint with encoders.
MULTIMODAL_FAMILY = replace(
    FAMILY,
    model_type="gemma4",
    text_config="text_config",
    encoder=gemma4_vision,
    tensor_names=TensorNames(
        prefixes=(("model.language_model.", "model."),), left_out=tuple(f"model.{name}." for name in _ENCODERS)
    ),
)
