"""SigLIP with Gemma 3's projection of pooled patches."""

from __future__ import annotations

from types import MappingProxyType

import torch
import torch.nn.functional as F

from minisgl_backend.encoders.parts import LayerNorm, PatchEmbedding, RMSNorm, Table
from minisgl_backend.encoders.transformer import Names, Transformer, TransformerState
from minisgl_backend.layers.encoder_config import SiglipConfig
from minisgl_backend.layers.weights import LayerContext

_QKV = MappingProxyType({f"self_attn.{name}_proj": 1 for name in "qkv"})
_NAMES = Names(("layer_norm1", "layer_norm2"), _QKV, "self_attn.out_proj", ("mlp.fc1",), "mlp.fc2")


class PooledSiglip(Transformer):
    """Every tile has the same size; `merge` by `merge` patches are averaged."""

    config: SiglipConfig
    in_blocks = False

    def __init__(self, config: SiglipConfig, context: LayerContext) -> None:
        tower, projector, size = context.at("vision_tower"), context.at("projector"), config.hidden_size
        super().__init__(config, _NAMES, "encoder.layers", tower)
        self.patches = PatchEmbedding(
            size, config.patch_size, "embeddings.patch_embedding", config.normalisation, tower, bias=config.patch_bias
        )
        self.positions = Table("embeddings.position_embedding.weight", (config.num_positions, size), tower)
        self.norm = LayerNorm(size, "post_layernorm", config.eps, tower)
        self.soft_norm = RMSNorm(size, "mm_soft_emb_norm", config.eps, projector, offset=1.0)
        self.projection = Table("mm_input_projection_weight", (size, config.out_size), projector)

    def embed(self, pixels: torch.Tensor, merge: int) -> torch.Tensor:
        return self.patches(pixels, merge)

    def table(self, rows: int, columns: int) -> torch.Tensor:
        return self.positions.weight

    def finish(self, state: TransformerState) -> torch.Tensor:
        rows, columns = state.layout.grid
        hidden = self.norm(state.hidden).view(-1, rows, columns, self.config.hidden_size).permute(0, 3, 1, 2)
        pooled = F.avg_pool2d(hidden, self.config.merge).flatten(2).transpose(1, 2).flatten(0, 1)
        return self.soft_norm(pooled) @ self.projection.weight
