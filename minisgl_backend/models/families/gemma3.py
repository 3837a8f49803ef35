"""Gemma 3, text: Gemma 2 without soft caps, with head norms, and another rope in layers with a window."""

from dataclasses import replace

from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, TensorNames, is_positive
from minisgl_backend.models.families.common import every, layer_types, norm
from minisgl_backend.models.families.eyes import gemma3_vision
from minisgl_backend.models.families.gemma2 import DEFAULTS, gemma
from minisgl_backend.models.rope import by_layer_type, make_rope, max_positions


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    pattern = keys.integer("sliding_window_pattern", keys.get("_sliding_window_pattern", 6))
    types = layer_types(keys, num_layers) or every(pattern, num_layers)
    return gemma(keys, types, _ropes(keys), qk_norm=norm(keys, weight_offset=1.0))


def _ropes(keys: Keys) -> dict[str, RopeConfig]:
    """By layer type: rope_parameters has a set for each; in transformers 4 there were three keys."""
    thetas = {FULL: keys.number("rope_theta", 1_000_000.0), SLIDING: keys.number("rope_local_base_freq", 10_000.0)}
    scaling = {FULL: keys.mapping("rope_scaling")}
    positions, head_dim = max_positions(keys), keys.integer("head_dim")
    ropes = {}
    for kind, given in by_layer_type(keys, thetas).items():
        values = {**given, **{key: value for key, value in scaling.get(kind, {}).items() if value is not None}}
        own_theta = values.pop("rope_theta", thetas[kind])
        # Of this family max_position_embeddings is the length behind the scaling.
        before = (
            {"original_max_position_embeddings": positions / values["factor"]}
            if is_positive(values.get("factor"))
            else {}
        )
        ropes[kind] = make_rope(keys, {**before, **values}, own_theta, head_dim)
    return ropes


_DEFAULTS = {**DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072}

FAMILY = Family(model_type="gemma3_text", read=read, defaults=_DEFAULTS)

# The text model of a checkpoint with an image encoder; with the names of transformers 4 and 5.
MULTIMODAL_FAMILY = replace(
    FAMILY,
    model_type="gemma3",
    text_config="text_config",
    encoder=gemma3_vision,
    tensor_names=TensorNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        left_out=tuple(
            f"{prefix}{name}." for prefix in ("", "model.") for name in ("vision_tower", "multi_modal_projector")
        ),
    ),
)
