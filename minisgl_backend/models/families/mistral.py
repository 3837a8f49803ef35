"""Mistral 7B, Nemo: Llama with one window for all layers, or none."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import FULL, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import attention, decoder, layer_types, mlp, norm, outgrows, window


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    size = window(keys, 4096)
    types = layer_types(keys, num_layers)  # transformers reads none for this architecture
    layer = LayerConfig(mixer=attention(keys, window=None if FULL in types else size), mlp=mlp(keys), norm=norm(keys))
    if len(set(types)) > 1 and outgrows(keys, layer.mixer.rope, size):
        refuse("layer_types", list(types), "one type for all layers of MistralForCausalLM")
    return decoder(keys, [layer] * num_layers)


FAMILY = Family(model_type="mistral", read=read)
