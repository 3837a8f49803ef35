"""Llama 2, 3, 3.1, 3.2 (text), 3.3, and models of the same architecture."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import decoder, layer_types, llama_attention, mlp, norm


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    layer_types(keys, num_layers, allowed=(FULL,))
    layer = LayerConfig(
        mixer=llama_attention(keys), mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)), norm=norm(keys)
    )
    return decoder(keys, [layer] * num_layers)


FAMILY = Family(model_type="llama", read=read)
