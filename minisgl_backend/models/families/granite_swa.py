"""Granite with windows in three of four layers, attention sinks in all layers, and a rope theta per layer."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.models.families import granite
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import check_window, layer_types, window


def read(keys: Keys) -> DecoderConfig:
    return with_sinks(keys, granite.read(keys))


def with_sinks(keys: Keys, without: DecoderConfig) -> DecoderConfig:
    """`without`: Granite's config without windows and sinks."""
    num_layers, size = without.num_layers, window(keys, 128)
    types = layer_types(keys, num_layers) or tuple(SLIDING if layer % 4 else FULL for layer in range(num_layers))
    check_window(size, types)
    ropes = _ropes(keys, without)

    def layer(plain: LayerConfig, kind: str, rope: RopeConfig | None) -> LayerConfig:
        return plain.with_mixer(rope=rope, window=size if kind == SLIDING else None, sinks=True)

    return replace(without, layers=tuple(map(layer, without.layers, types, ropes)))


def _ropes(keys: Keys, plain: DecoderConfig) -> list[RopeConfig | None]:
    """By layer: the config's rope with the theta of layer_rope_theta, where 0 means no position embedding."""
    ropes = [layer.mixer.rope for layer in plain.layers]
    thetas = keys.get("layer_rope_theta")
    if thetas is None:
        return ropes
    if not isinstance(thetas, list) or len(thetas) != len(ropes):
        refuse("layer_rope_theta", thetas, f"a number, 0 or more, for each of the {len(ropes)} layers")
    for theta in thetas:
        if not isinstance(theta, (int, float)) or isinstance(theta, bool) or theta < 0:
            refuse("layer_rope_theta", theta, "a number, 0 or more")
    return [
        replace(rope, theta=float(theta)) if rope and theta else None for rope, theta in zip(ropes, thetas, strict=True)
    ]


FAMILY = Family(
    model_type="granite_swa",
    read=read,
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
)
