"""Qwen3: RMSNorm of each query and key head before the rotation."""

from __future__ import annotations

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM, DecoderLayer, attention_shape


class Qwen3ForCausalLM(CausalLM):
    def make_layer(self, config: ModelConfig, index: int, cos_sin: torch.Tensor, place: LayerContext) -> DecoderLayer:
        bias = config.attention_bias
        shape = attention_shape(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
        attention = SelfAttention(shape, index, cos_sin, place)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, place)
        return DecoderLayer(config, attention, mlp, place)
