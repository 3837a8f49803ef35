"""Ministral: Mistral with a window in some layers."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, decoder, layer_types, mlp, norm, window


def read(keys: Keys) -> DecoderConfig:
    num_layers, size = keys.integer("num_hidden_layers"), window(keys, None)
    heads = attention(keys)
    layer = LayerConfig(mixer=heads, mlp=mlp(keys), norm=norm(keys))
    types = layer_types(keys, num_layers) or (SLIDING,) * num_layers
    windows = [size if kind == SLIDING else None for kind in types]
    return decoder(keys, [layer.with_mixer(window=one) for one in windows])


FAMILY = Family(model_type="ministral", read=read, defaults={"num_key_value_heads": 8, "sliding_window": 4096})
