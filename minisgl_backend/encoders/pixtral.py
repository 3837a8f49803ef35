"""Pixtral with Mistral 3's merging of patches."""

from __future__ import annotations

from types import MappingProxyType

import torch

from minisgl_backend.encoders.parts import ACTIVATIONS, Linear, PatchEmbedding, RMSNorm
from minisgl_backend.encoders.transformer import Names, Transformer, TransformerState
from minisgl_backend.layers.encoder_config import PixtralConfig
from minisgl_backend.layers.weights import LayerContext

_QKV = MappingProxyType({f"attention.{name}_proj": 1 for name in "qkv"})
_MLP = ("feed_forward.gate_proj", "feed_forward.up_proj")
_NAMES = Names(("attention_norm", "ffn_norm"), _QKV, "attention.o_proj", _MLP, "feed_forward.down_proj")


class Pixtral(Transformer):
    config: PixtralConfig

    def __init__(self, config: PixtralConfig, context: LayerContext) -> None:
        tower, projector, size = context.at("vision_tower"), context.at("projector"), config.hidden_size
        super().__init__(config, _NAMES, "transformer.layers", tower)
        self.patches = PatchEmbedding(
            size, config.patch_size, "patch_conv", config.normalisation, tower, bias=config.patch_bias
        )
        self.before = RMSNorm(size, "ln_pre", config.eps, tower)
        self.norm = RMSNorm(size, "norm", config.projector_eps, projector)
        self.merging = Linear(size * config.merge**2, {"patch_merger.merging_layer": size}, False, projector)
        self.up = Linear(size, {"linear_1": config.out_size}, config.projector_bias, projector)
        self.down = Linear(config.out_size, {"linear_2": config.out_size}, config.projector_bias, projector)
        self._activation = ACTIVATIONS[config.projector_activation]

    def embed(self, pixels: torch.Tensor, merge: int) -> torch.Tensor:
        embedded: torch.Tensor = self.before(self.patches(pixels, merge))
        return embedded

    def finish(self, state: TransformerState) -> torch.Tensor:
        # The merging layer's inputs go by channel first, as torch's unfold has them.
        blocks = self.norm(state.hidden).unflatten(0, (-1, self.config.merge**2)).transpose(1, 2).flatten(1)
        vectors: torch.Tensor = self.down(self._activation(self.up(self.merging(blocks))))
        return vectors
