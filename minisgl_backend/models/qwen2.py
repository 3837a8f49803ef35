"""Qwen2 and Qwen2.5: always a bias on queries, keys and values, never on the attention's output."""

from __future__ import annotations

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM, DecoderLayer, attention_shape


class Qwen2ForCausalLM(CausalLM):
    def make_layer(self, config: ModelConfig, index: int, cos_sin: torch.Tensor, place: LayerContext) -> DecoderLayer:
        shape = attention_shape(config, qkv_bias=True, output_bias=False, qk_norm=False)
        attention = SelfAttention(shape, index, cos_sin, place)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, place)
        return DecoderLayer(config, attention, mlp, place)
