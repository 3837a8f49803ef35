"""Qwen3-MoE: Qwen3's attention, with a mixture of experts in place of the MLP of most layers."""

from __future__ import annotations

import torch

from minisgl_backend.layers.attention import SelfAttention
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.moe import MoeMLP
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM, DecoderLayer, attention_shape


class Qwen3MoeForCausalLM(CausalLM):
    def make_layer(self, config: ModelConfig, index: int, cos_sin: torch.Tensor, place: LayerContext) -> DecoderLayer:
        bias = config.attention_bias
        shape = attention_shape(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
        attention = SelfAttention(shape, index, cos_sin, place)
        return DecoderLayer(config, attention, _mlp(config, index, place), place)


def _mlp(config: ModelConfig, index: int, place: LayerContext) -> GatedMLP | MoeMLP:
    if config.moe is None or index in config.moe.dense_layers:
        return GatedMLP(config.hidden_size, config.intermediate_size, place)
    return MoeMLP(
        hidden_size=config.hidden_size,
        intermediate_size=config.moe.intermediate_size,
        num_experts=config.moe.num_experts,
        experts_per_token=config.moe.experts_per_token,
        norm_topk_prob=config.moe.norm_topk_prob,
        name="mlp",
        placement=place,
    )
