"""Command R7B and Command A: Cohere's layers; every fourth has full attention and no position embedding."""

from minisgl_backend.models.families.base import SLIDING, DecoderConfig, Family, Keys, refuse
from minisgl_backend.models.families.cohere import cohere, cohere_rope, parallel_layer
from minisgl_backend.models.families.common import every, layer_types, window


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    types = layer_types(keys, num_layers) or every(keys.integer("sliding_window_pattern", 4), num_layers)
    keys.without_effect("sliding_window_pattern")
    size = window(keys, 4096)
    if size is None:
        refuse("sliding_window", size, "an integer, 1 or more")
    # Keys of the released models whose values transformers assumes.
    keys.choice("position_embedding_type", ("rope_gptj",))
    keys.choice("use_parallel_block", (True,))
    keys.choice("use_gated_activation", (True,))
    layers = {True: parallel_layer(keys, cohere_rope(keys), size), False: parallel_layer(keys, None, None)}
    return cohere(keys, [layers[kind == SLIDING] for kind in types])


FAMILY = Family(model_type="cohere2", read=read, defaults={"tie_word_embeddings": True})
