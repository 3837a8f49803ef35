"""EXAONE 4: norms of the outputs of attention and MLP, and of heads; layers without a window have no rope."""

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import FULL, SLIDING, DecoderConfig, Family, Keys, read_rope, refuse
from minisgl_backend.models.families.common import attention, decoder, head_size, layer_types, mlp, norm
from minisgl_backend.models.families.common import window as read_window


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    window = read_window(keys, None)
    is_mixed = window is not None  # even if it is longer than any sequence
    head_dim = head_size(keys)
    rope = read_rope(keys, head_dim)

    def layer(kind: str) -> LayerConfig:
        slides = kind == SLIDING
        return LayerConfig(
            mixer=attention(
                keys,
                rope=rope if slides or not is_mixed else None,
                window=window if slides else None,
                qk_norm=norm(keys, eps=1e-5),
            ),
            mlp=mlp(keys),
            norm=norm(keys, eps=1e-5),
            norms="after",
        )

    types = layer_types(keys, num_layers) or (_types(keys, num_layers) if is_mixed else (FULL,) * num_layers)
    keys.without_effect("sliding_window_pattern")
    return decoder(keys, [layer(kind) for kind in types])


def _types(keys: Keys, num_layers: int) -> tuple[str, ...]:
    """By sliding_window_pattern: an integer n makes every n-th layer global; letters L and G repeat over the layers,
    and the last layer is then always global."""
    letters = keys.get("sliding_window_pattern")
    if isinstance(letters, str):
        if not letters or set(letters) - set("LG"):
            refuse("sliding_window_pattern", letters, "an integer, 1 or more, or letters L (local) and G (global)")
        slides = [letters[layer % len(letters)] == "L" for layer in range(num_layers - 1)]
        return (*(SLIDING if one else FULL for one in slides), FULL)
    pattern = keys.integer("sliding_window_pattern", 4)
    return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers))


FAMILY = Family(model_type="exaone4", read=read, defaults={"sliding_window": 4096})
