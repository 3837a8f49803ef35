"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; experts, and a shared expert with a gate."""

from dataclasses import replace

from minisgl_backend.layers.config import LayerConfig
from minisgl_backend.models.families.base import DecoderConfig, Family, Keys
from minisgl_backend.models.families.common import attention, decoder, mlp, norm
from minisgl_backend.models.families.qwen2 import windows_where
from minisgl_backend.models.families.qwen3_moe import experts, sparse_layers


def read(keys: Keys) -> DecoderConfig:
    shared = attention(keys, qkv_bias=keys.boolean("qkv_bias", True))
    dense = mlp(keys)
    mixture = replace(
        experts(keys), shared_intermediate_size=keys.integer("shared_expert_intermediate_size", 5632), shared_gate=True
    )
    windows = windows_where(keys, _slides)
    layers = [
        LayerConfig(mixer=replace(shared, window=window), mlp=mixture if is_sparse else dense, norm=norm(keys))
        for window, is_sparse in zip(windows, sparse_layers(keys), strict=True)
    ]
    return decoder(keys, layers)


def _slides(layer: int, max_window_layers: int) -> bool:
    """Unlike Qwen2: every second layer below max_window_layers, from the first on."""
    return layer % 2 == 0 and layer < max_window_layers


FAMILY = Family(model_type="qwen2_moe", read=read)
