"""Llama 4, text: chunked attention, except in layers without position embedding, whose queries are scaled by their
position; one expert per token and a shared expert."""

from dataclasses import replace
from typing import Any

from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig, RouterConfig
from minisgl_backend.layers.mixer_config import (
    AttentionConfig,
    AttentionTemperatureTuning,
    TemperatureTunedAttentionConfig,
)
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, Stored, TensorNames, refuse
from minisgl_backend.models.families.common import activation, attention, decoder, layer_types, norm
from minisgl_backend.models.rope import read_rope

_CHUNKED = "chunked_attention"  # in layer_types
_ROPES = ("default", "linear", "llama3")  # other types scale queries and keys, which the norm after it would undo


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    rotated = _rotated(keys, num_layers)
    chunk = keys.integer("attention_chunk_size") if keys.get("attention_chunk_size") is not None else None
    types = layer_types(keys, num_layers, (FULL, _CHUNKED))
    if not types:
        types = tuple(_CHUNKED if has_rope and chunk is not None else FULL for has_rope in rotated)
    if chunk is None and _CHUNKED in types:
        refuse("attention_chunk_size", chunk, f"an integer, 1 or more, as layer_types has {_CHUNKED}")
    sparse = _sparse_layers(keys, num_layers)
    dense = MlpConfig(intermediate_size=keys.integer("intermediate_size_mlp"), activation=activation(keys))
    mixture = _mixture(keys)
    layers = [
        LayerConfig(
            mixer=_attention(keys, has_rope=bool(has_rope), chunk=chunk if kind == _CHUNKED else None),
            mlp=mixture if index in sparse else dense,
            norm=norm(keys, eps=1e-5),
        )
        for index, (has_rope, kind) in enumerate(zip(rotated, types, strict=True))
    ]
    return decoder(keys, layers)


def _rotated(keys: Keys, num_layers: int) -> list[Any]:
    """By layer: whether it has a rope."""
    interval, given = keys.integer("no_rope_layer_interval", 4), keys.get("no_rope_layers")
    rotated = given or [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or any(one not in (0, 1) for one in rotated):
        refuse("no_rope_layers", given, f"an entry for each of the {num_layers} layers, 1 for those that have a rope")
    return rotated[:num_layers]


def _sparse_layers(keys: Keys, num_layers: int) -> set[int]:
    """Those with experts."""
    step, given = keys.integer("interleave_moe_layer_step", 1), keys.get("moe_layers")
    if given is None:
        return set(range(step - 1, num_layers, step))
    if not isinstance(given, list) or any(one not in range(num_layers) for one in given):
        refuse("moe_layers", given, f"a list of layers, 0 to {num_layers - 1}")
    return set(given)


def _attention(keys: Keys, *, has_rope: bool, chunk: int | None) -> AttentionConfig:
    bias, tuning = keys.boolean("attention_bias", False), _temperature_tuning(keys)
    rope = read_rope(keys, keys.integer("head_dim"), interleaved=True)
    if rope.type not in _ROPES:
        refuse("rope_type", rope.type, ", ".join(_ROPES))
    has_norm = keys.boolean("use_qk_norm", True) and has_rope
    tuned: dict[str, Any] = {}
    if tuning is not None and not has_rope:
        tuned = {"kind": TemperatureTunedAttentionConfig, "tuning": tuning}
    return attention(
        keys,
        rope=rope if has_rope else None,
        chunk=chunk,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm(keys, eps=1e-5, weight=False) if has_norm else None,  # the same before or after the rope
        **tuned,
    )


def _temperature_tuning(keys: Keys) -> AttentionTemperatureTuning | None:
    tuned = keys.get("attn_temperature_tuning", True)
    if not isinstance(tuned, int) or tuned < 0:  # early configs have 4
        refuse("attn_temperature_tuning", tuned, "true or false")
    tuning = AttentionTemperatureTuning(beta=keys.number("attn_scale"), every=keys.integer("floor_scale"), offset=1)
    return tuning if tuned else None


def _mixture(keys: Keys) -> MoeConfig:
    keys.choice("num_experts_per_tok", (1,))
    size = keys.integer("intermediate_size")
    keys.without_effect("router_jitter_noise")  # for training
    return MoeConfig(
        num_experts=keys.integer("num_local_experts"),
        experts_per_token=1,
        intermediate_size=size,
        activation=activation(keys),
        router=RouterConfig(scores="sigmoid", renormalize=False, on_input=True),
        shared_intermediate_size=size,
    )


_KINDS = ("gate", "up", "down")
_STORED = (
    Stored(name="feed_forward.router", of=("mlp.gate",)),
    *(Stored(name=f"feed_forward.{kind}_proj", of=(f"mlp.{kind}_proj",)) for kind in _KINDS),
    *(
        Stored(name=f"feed_forward.shared_expert.{kind}_proj", of=(f"mlp.shared_expert.{kind}_proj",))
        for kind in _KINDS
    ),
    Stored(
        name="feed_forward.experts.gate_up_proj",
        of=("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
        transposed=True,
    ),
    Stored(name="feed_forward.experts.down_proj", of=("mlp.experts.down_proj.weight",), transposed=True),
)
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}

FAMILY = Family(model_type="llama4_text", read=read, defaults=_DEFAULTS, tensor_names=TensorNames(stored=_STORED))

# The text model of a checkpoint with an image encoder.
MULTIMODAL_FAMILY = replace(
    FAMILY,
    model_type="llama4",
    text_config="text_config",
    tensor_names=TensorNames(
        stored=_STORED,
        prefixes=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        left_out=("vision_model.", "multi_modal_projector."),
    ),
)
