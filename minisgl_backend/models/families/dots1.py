"""dots.llm1: Qwen3's attention, with the mixtures of DeepSeek-V3."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import SHARED_EXPERTS, SLIDING, DecoderConfig, Family, Keys, TensorNames
from minisgl_backend.models.families.common import decoder, layer_types, mlps, norm, window
from minisgl_backend.models.families.qwen3 import head_norm_attention


def read(keys: Keys) -> DecoderConfig:
    num_layers = keys.integer("num_hidden_layers")
    size, first = window(keys, 4096), keys.integer("max_window_layers", 62, least=0)
    types = layer_types(keys, num_layers)
    slides = [kind == SLIDING for kind in types] or [layer >= first for layer in range(num_layers)]
    heads = head_norm_attention(keys)
    layers = [
        LayerConfig(mixer=replace(heads, window=size if sliding else None), mlp=mlp, norm=norm(keys))
        for sliding, mlp in zip(slides, mlps(keys, dense=0, norm_topk_prob=False), strict=True)
    ]
    return decoder(keys, layers)


FAMILY = Family(model_type="dots1", read=read, tensor_names=TensorNames(stored=SHARED_EXPERTS))
