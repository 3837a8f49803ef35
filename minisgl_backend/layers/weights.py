"""Base of layers with weights: where the weights are, and how they are loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from minisgl_backend.kernels.ops import Ops
from minisgl_backend.layers.mixer_config import RopeConfig
from minisgl_backend.layers.rotary import RopeTable, RopeTables
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.layer import WeightedLayer, empty_parameter
from minisgl_backend.weights.methods import WeightMethods

__all__ = ["LayerContext", "WeightedLayer"]


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Device and dtype of a module's weights, the kernels that use them, and the module's path in the model."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    tp: TensorParallel
    methods: WeightMethods  # of linear layers and experts, by path
    path: str = ""  # dotted path: model.layers.3.mlp
    ropes: RopeTables | None = None  # which the mixers of a model share

    def within(self, max_seq_len: int) -> LayerContext:
        """The context of a model that is asked for up to this many positions."""
        return dataclasses.replace(self, ropes=RopeTables(max_seq_len, self.device))

    def rope_table(self, rope: RopeConfig | None, head_dim: int) -> RopeTable:
        """See `RopeTables.of`; only after `within`."""
        assert self.ropes is not None, "only mixers ask, which are in a model"
        return self.ropes.of(rope, head_dim)

    def at(self, name: str) -> LayerContext:
        """The context of a submodule."""
        return dataclasses.replace(self, path=self.name(name))

    def name(self, name: str) -> str:
        """The full dotted name."""
        return f"{self.path}.{name}" if self.path else name

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight that never needs gradients; `dtype`: where it is not the model's."""
        return empty_parameter(*shape, dtype=dtype or self.dtype, device=self.device)
