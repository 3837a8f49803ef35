"""What a layer wants from a checkpoint: named tensors, the part that this rank needs, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from minisgl_backend.kernels.ops import Ops
from minisgl_backend.tensor_parallel import TensorParallel


@dataclass(frozen=True, kw_only=True)
class LayerContext:
    """Where a layer's weights live and what computes with them; the same object for every layer of a model."""

    device: torch.device
    dtype: torch.dtype
    ops: Ops
    tp: TensorParallel

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised weight that never needs gradients."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """One tensor of the checkpoint: `target` receives `tensor.narrow(dim, start, target.shape[dim])`."""

    name: str  # as in the checkpoint, relative to the module that the layer is part of
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    target: torch.Tensor  # a parameter or a view of one
    dim: int = 0
    start: int = 0


class WeightedLayer(nn.Module):
    """A module with parameters. All of them are filled through `weight_parts`, each element exactly once."""

    def weight_parts(self) -> list[WeightPart]:
        raise NotImplementedError
