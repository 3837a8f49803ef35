"""CWM: Llama with a window in three of four layers."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, check_window, decoder, layer_types, mlp, norm, window

_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(keys: Keys) -> DecoderConfig:
    num_layers, size = keys.integer("num_hidden_layers"), window(keys, 8192)
    types = layer_types(keys, num_layers) or tuple(SLIDING if layer % 4 else FULL for layer in range(num_layers))
    check_window(size, types)
    layers = {
        kind: LayerConfig(
            mixer=attention(keys, window=size if kind == SLIDING else None),
            mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
            norm=norm(keys, eps=1e-5),
        )
        for kind in (FULL, SLIDING)
    }
    return decoder(keys, [layers[kind] for kind in types])


FAMILY = Family(
    model_type="cwm",
    read=read,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1_000_000.0, "rope_parameters": _ROPE},
)
