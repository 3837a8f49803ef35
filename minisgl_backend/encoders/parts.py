"""Layers that encoders are made of, each with the names of its weights in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import nn

from minisgl_backend.layers.encoder_config import Normalisation
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.layer import WeightedLayer
from minisgl_backend.weights.parts import WeightPart

ALIGNED = 8  # numbers of 16 bits that GEMMs read at once, where rows are multiples of it
_MIDDLE = 128  # of a pixel's values; pixels minus it are exact in bfloat16, and closer to 0

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "silu": F.silu,
    }
)
GATES: Mapping[str, str] = MappingProxyType({"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"})
"""What `kernels.elementwise.activate_mul` names them, where it has them."""


class Linear(WeightedLayer):
    """One or several linear layers with the same input, whose outputs follow one another."""

    def __init__(self, inputs: int, outputs: Mapping[str, int], bias: bool, context: LayerContext) -> None:
        """outputs: sizes by name in the checkpoint, relative to the context's path."""
        super().__init__()
        self._outputs = {context.name(name): size for name, size in outputs.items()}
        total = sum(outputs.values())
        self.weight = context.parameter(total, inputs)
        self.bias = context.parameter(total) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def weight_parts(self) -> list[WeightPart]:
        parts, at = [], 0
        for name, size in self._outputs.items():
            rows = slice(at, at + size)
            shape = (size, self.weight.shape[1])
            parts.append(WeightPart(name=f"{name}.weight", shape=shape, target=self.weight[rows]))
            if self.bias is not None:
                parts.append(WeightPart(name=f"{name}.bias", shape=(size,), target=self.bias[rows]))
            at += size
        return parts

    def pad_outputs(self, count: int, more: int) -> None:
        """Adds so many zeros behind each of `count` equal parts of the outputs."""
        self.weight.data = F.pad(self.weight.data.unflatten(0, (count, -1)), (0, 0, 0, more)).flatten(0, 1)
        if self.bias is not None:
            self.bias.data = F.pad(self.bias.data.unflatten(0, (count, -1)), (0, more)).flatten()

    def pad_inputs(self, more: int) -> None:
        """For inputs with so many zeros behind them."""
        self.weight.data = F.pad(self.weight.data, (0, more))


class Table(WeightedLayer):
    """A parameter as it is in the checkpoint."""

    def __init__(self, name: str, shape: tuple[int, ...], context: LayerContext) -> None:
        super().__init__()
        self._name = context.name(name)
        self.weight = context.parameter(*shape)

    def weight_parts(self) -> list[WeightPart]:
        return [WeightPart(name=self._name, shape=tuple(self.weight.shape), target=self.weight)]


class RMSNorm(WeightedLayer):
    def __init__(self, size: int, name: str, eps: float, context: LayerContext, offset: float = 0.0) -> None:
        """offset: added to the stored weight."""
        super().__init__()
        self._ops = context.ops
        self._name, self._eps, self._offset = context.name(name), eps, offset
        self.weight = context.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def weight_parts(self) -> list[WeightPart]:
        shape = (len(self.weight),)
        return [WeightPart(name=f"{self._name}.weight", shape=shape, target=self.weight, add=self._offset)]


class LayerNorm(WeightedLayer):
    def __init__(self, size: int, name: str, eps: float, context: LayerContext) -> None:
        super().__init__()
        self._name, self._eps = context.name(name), eps
        self.weight, self.bias = context.parameter(size), context.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self._eps)

    def weight_parts(self) -> list[WeightPart]:
        shape, name = (len(self.weight),), self._name
        named = (("weight", self.weight), ("bias", self.bias))
        return [WeightPart(name=f"{name}.{kind}", shape=shape, target=target) for kind, target in named]


def norm(kind: str, size: int, name: str, eps: float, context: LayerContext) -> nn.Module:
    """`kind`: of `TransformerConfig.norm`."""
    return (RMSNorm if kind == "rms" else LayerNorm)(size, name, eps, context)


class PatchEmbedding(WeightedLayer):
    """From pixels as they are to embeddings of patches, in one GEMM: the weight has the normalisation in it, and the
    sum over frames, which of an image are equal. In float64, so that folding costs no precision."""

    def __init__(
        self,
        size: int,
        patch: int,
        name: str,
        normalisation: Normalisation,
        context: LayerContext,
        *,
        frames: int | None = None,
        bias: bool = True,
    ) -> None:
        """frames: of the stored weight; None: it has no such axis."""
        super().__init__()
        self._name, self._patch, self._frames = context.name(name), patch, frames
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float64) for values in (normalisation.mean, normalisation.std)
        )
        self.weight = context.parameter(size, 3 * patch * patch)
        self.shift = context.parameter(size, dtype=torch.float32)  # of zero pixels, without `bias`
        self.bias = context.parameter(size) if bias else None

    def forward(self, pixels: torch.Tensor, merge: int = 1) -> torch.Tensor:
        """uint8 [tiles, height, width, 3] -> [tiles * patches, size]; the patches of a block of `merge` by `merge`
        follow one another, blocks row by row."""
        tiles, height, width, _ = pixels.shape
        side, dtype = self._patch, self.weight.dtype
        rows, columns = height // side // merge, width // side // merge
        centred = (pixels.to(torch.int16) - _MIDDLE).to(dtype)
        blocks = centred.view(tiles, rows, merge, side, columns, merge, side, 3)
        patches = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3 * side * side)
        if more := self.weight.shape[1] - patches.shape[1]:
            patches = F.pad(patches, (0, more))
        shift = self.shift if self.bias is None else self.shift + self.bias
        return F.linear(patches, self.weight, shift.to(dtype))

    def align(self) -> None:
        """Pads the weight with zeros, for GEMMs."""
        self.weight.data = F.pad(self.weight.data, (0, -self.weight.shape[1] % ALIGNED))

    def weight_parts(self) -> list[WeightPart]:
        frames = () if self._frames is None else (self._frames,)
        shape = (len(self.weight), 3, *frames, self._patch, self._patch)
        name = f"{self._name}.weight"
        parts = [
            WeightPart(name=name, shape=shape, target=self.weight, convert=lambda read: self._folded(read).flatten(1)),
            WeightPart(name=name, shape=shape, target=self.shift, convert=self._shift_of),
        ]
        if self.bias is not None:
            parts.append(WeightPart(name=f"{self._name}.bias", shape=(len(self.bias),), target=self.bias))
        return parts

    def _folded(self, read: torch.Tensor) -> torch.Tensor:
        """[size, 3, patch, patch], for pixels of 0 to 255."""
        return self._summed(read) / (255 * self._std.to(read.device)).view(3, 1, 1)

    def _shift_of(self, read: torch.Tensor) -> torch.Tensor:
        at_zero = -(self._summed(read) * (self._mean / self._std).to(read.device).view(3, 1, 1)).sum((1, 2, 3))
        return at_zero + _MIDDLE * self._folded(read).sum((1, 2, 3))

    def _summed(self, read: torch.Tensor) -> torch.Tensor:
        weight = read.to(torch.float64)
        return weight if self._frames is None else weight.sum(2)
