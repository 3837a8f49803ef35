"""Qwen2 and Qwen2.5: always a bias on queries, keys and values, never on the attention's output.

Knows nothing of checkpoints or parallelism.
"""

from __future__ import annotations

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.weights import Placement
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM, DecoderLayer, attention_shape


class Qwen2ForCausalLM(CausalLM):
    def make_layer(self, config: ModelConfig, index: int, cos_sin: torch.Tensor, placement: Placement) -> DecoderLayer:
        shape = attention_shape(config, qkv_bias=True, output_bias=False, qk_norm=False)
        attention = SelfAttention(shape, index, cos_sin, placement)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, placement)
        return DecoderLayer(config, attention, mlp, placement)
