"""OLMo 3: OLMo 2 with a window in three of four layers, and another rope in those."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.layers.mixer_config import NormOverHeadsAttentionConfig, RopeConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.common import attention, check_window, decoder, layer_types, mlp, norm, window
from minisgl_backend.models.rope import by_layer_type, make_rope

_THETA = 500_000.0


def read(keys: Keys) -> DecoderConfig:
    num_layers, num_heads = keys.integer("num_hidden_layers"), keys.integer("num_attention_heads")
    types = layer_types(keys, num_layers) or tuple(FULL if layer % 4 == 3 else SLIDING for layer in range(num_layers))
    size = window(keys, 4096)
    check_window(size, types)
    bias = keys.boolean("attention_bias", False)
    ropes = _ropes(keys, keys.integer("head_dim", keys.integer("hidden_size") // num_heads))

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(
            mixer=attention(
                keys,
                NormOverHeadsAttentionConfig,
                num_kv_heads=num_heads,
                rope=ropes[kind],
                window=size if kind == SLIDING else None,
                bias=bias,
                qk_norm=norm(keys, eps=1e-5),
            ),
            mlp=mlp(keys),
            norm=norm(keys, eps=1e-5),
            norms="after",
        )

    return decoder(keys, [layer(kind) for kind in types])


def _ropes(keys: Keys, head_dim: int) -> dict[str, RopeConfig]:
    """By layer type: rope_parameters has a set for each. The rope_scaling of transformers 4 applies to layers without a
    window."""
    given, theta = by_layer_type(keys, (FULL, SLIDING)), keys.number("rope_theta", _THETA)
    if theta != _THETA and "rope_theta" not in given[SLIDING]:
        # transformers 4 uses it for all layers, transformers 5 only for those without a window.
        refuse("rope_theta", theta, f"{_THETA}, or a rope_theta for each of the layer types in rope_parameters")
    given[FULL] |= {key: value for key, value in keys.mapping("rope_scaling").items() if value is not None}
    ropes = {}
    for kind, values in given.items():
        own_theta = values.pop("rope_theta", theta)
        ropes[kind] = make_rope(keys, values, own_theta, head_dim)
    return ropes


FAMILY = Family(model_type="olmo3", read=read)
