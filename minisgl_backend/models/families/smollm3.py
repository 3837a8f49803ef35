"""SmolLM3: Llama without position embedding in every fourth layer."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys, read_rope, refuse
from minisgl_backend.models.families.common import attention, decoder, head_size, layer_types, mlp, norm, window


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    bias = keys.boolean("attention_bias", False)
    size = window(keys, None) if keys.boolean("use_sliding_window", False) else None
    keys.without_effect("sliding_window")
    interval = keys.integer("no_rope_layer_interval", 4)
    rotated = keys.get("no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    if not isinstance(rotated, list) or len(rotated) != num_layers:
        refuse(
            "no_rope_layers", rotated, f"one entry for each of the {num_layers} layers, 1 for those that have a rope"
        )
    types = layer_types(keys, num_layers) or ["" if has_rope else SLIDING for has_rope in rotated]
    rope = read_rope(keys, head_size(keys))
    layers = [
        LayerConfig(
            mixer=attention(keys, bias=bias, rope=rope if has_rope else None, window=size if kind == SLIDING else None),
            mlp=mlp(keys, bias=keys.boolean("mlp_bias", False)),
            norm=norm(keys),
        )
        for kind, has_rope in zip(types, rotated, strict=True)
    ]
    return decoder(keys, layers)


FAMILY = Family(
    model_type="smollm3",
    read=read,
    defaults={"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
