"""What every layer with weights shares: where they live, and what it says of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from minisgl_backend.kernels.ops import Ops
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.parts import WeightPart

_NOISE = 0.02  # standard deviation, about that of weights before their training


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Where a module's weights live, what computes with them, and where in the model it is."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    tp: TensorParallel
    path: str = ""  # names of modules with dots between them: model.layers.3.mlp

    def at(self, name: str) -> LayerContext:
        """The same for a module within this one."""
        return dataclasses.replace(self, path=self.name(name))

    def name(self, name: str) -> str:
        """In full, from the model down."""
        return f"{self.path}.{name}" if self.path else name

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight that never needs gradients; `dtype`: where it is not the model's."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


class WeightedLayer(nn.Module):
    """A module with parameters. All of them are filled through `weight_parts`, each element exactly once."""

    def weight_parts(self) -> list[WeightPart]:
        """What the layer needs of a checkpoint."""
        raise NotImplementedError

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Random weights of a plausible size in place of those of a checkpoint."""
        for parameter in self.parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0.0, _NOISE, generator=generator)

    def gemm_weights(self) -> list[torch.Tensor]:
        """The weights of `Ops.linear` in this layer that may have a kernel chosen for them before a capture."""
        return []
