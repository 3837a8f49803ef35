"""Qwen2 and Qwen2.5: always a bias on queries, keys and values, never on the attention's output."""

from collections.abc import Callable

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import attention, decoder, layer_types, mlp, norm, window


def read(keys: Keys) -> DecoderConfig:
    heads = attention(keys, qkv_bias=True)
    layer = LayerConfig(mixer=heads, mlp=mlp(keys), norm=norm(keys))
    windows = windows_above(keys)
    return decoder(keys, [layer.with_mixer(window=size) for size in windows])


def windows_above(keys: Keys) -> list[int | None]:
    """The window of each layer: those of layer_types, or all layers from max_window_layers on."""
    return windows_where(keys, lambda layer, max_window_layers: layer >= max_window_layers)


def windows_where(keys: Keys, slides: Callable[[int, int], bool]) -> list[int | None]:
    """The window of each layer: those of layer_types, or those for which slides(layer, max_window_layers)."""
    num_layers = keys.integer("num_hidden_layers")
    types = layer_types(keys, num_layers)
    first = keys.get("max_window_layers", 28)
    if not keys.get("use_sliding_window"):
        keys.without_effect("sliding_window")
        return [None] * num_layers
    size = window(keys, 4096)
    if not isinstance(first, int) or isinstance(first, bool):
        refuse("max_window_layers", first, "an integer")
    if types:
        return [size if layer_type == SLIDING else None for layer_type in types]
    return [size if slides(layer, first) else None for layer in range(num_layers)]


FAMILY = Family(model_type="qwen2", read=read)
