"""RMSNorm and LayerNorm, and where sublayers have them. GEMMs that follow an RMSNorm apply it (`LinearMethod`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from minisgl_backend.layers.mixer_config import NormConfig
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class RMSNorm(WeightedLayer):
    """Root mean square norm (Zhang and Sennrich, 2019), the same on every rank.

    A `weight_offset` is added in float32 when the weights are loaded: Gemma stores weights around 0, and the model's
    dtype would round their sum with 1. `weight` is then float32, which kernels use directly.
    """

    def __init__(
        self,
        size: int,
        config: NormConfig,
        name: str,
        layer_context: LayerContext,
        row_order: tuple[int, ...] | None = None,
    ) -> None:
        """row_order: of the weights, see `WeightPart.row_order`."""
        super().__init__()
        self._ops = layer_context.ops
        self._name = layer_context.name(name)
        self._offset, self._row_order = config.weight_offset, row_order
        self.eps = config.eps
        self.weight = layer_context.parameter(size, dtype=torch.float32 if self._offset else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, size] -> same shape."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor, multiplier: float) -> torch.Tensor:
        """hidden + multiplier * norm(x), all [num_tokens, size]; hidden may be overwritten."""
        return self._ops.add_norm(hidden, x, self.weight, self.eps, multiplier)

    def weight_parts(self) -> list[WeightPart]:
        return [
            WeightPart(
                name=f"{self._name}.weight",
                shape=tuple(self.weight.shape),
                target=self.weight,
                add=self._offset,
                row_order=self._row_order,
            )
        ]


class LayerNorm(WeightedLayer):
    """Layer norm (Ba et al., 2016), the same on every rank. No GEMM kernel includes it: it is a separate kernel."""

    def __init__(self, size: int, config: NormConfig, name: str, layer_context: LayerContext) -> None:
        super().__init__()
        self._name = layer_context.name(name)
        self._offset = config.weight_offset
        self.eps = config.eps
        dtype = torch.float32 if self._offset else None
        self._has_weight = config.weight
        self.weight: torch.Tensor
        if config.weight:
            self.weight = layer_context.parameter(size, dtype=dtype)
        else:  # the kernel needs a weight: ones
            self.register_buffer("weight", torch.ones(size, dtype=layer_context.dtype, device=layer_context.device))
        self.bias = layer_context.parameter(size, dtype=dtype) if config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, size] -> same shape."""
        normed = F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor, multiplier: float) -> torch.Tensor:
        """hidden + multiplier * norm(x), all [num_tokens, size]."""
        return torch.add(hidden, self(x), alpha=multiplier)

    def weight_parts(self) -> list[WeightPart]:
        shape = tuple(self.weight.shape)
        parts = []
        if self._has_weight:
            parts.append(WeightPart(name=f"{self._name}.weight", shape=shape, target=self.weight, add=self._offset))
        if self.bias is not None:
            parts.append(WeightPart(name=f"{self._name}.bias", shape=shape, target=self.bias))
        return parts


Norm = RMSNorm | LayerNorm


def make_norm(size: int, config: NormConfig, name: str, layer_context: LayerContext) -> Norm:
    """The norm that the config describes, for rows of `size` numbers."""
    return (RMSNorm if config.kind == "rms" else LayerNorm)(size, config, name, layer_context)


class NormOverHeads(WeightedLayer):
    """RMSNorm over all heads of the queries, or of the keys, together (OLMo-2). Each rank has some of the heads."""

    def __init__(
        self,
        size: int,
        num_parts: int,
        config: NormConfig,
        name: str,
        layer_context: LayerContext,
        row_order: tuple[int, ...] | None = None,
    ) -> None:
        """size: of all heads. num_parts: number of different parts; several ranks may have the same one."""
        super().__init__()
        self._ops, self._tp = layer_context.ops, layer_context.tp
        self._name = layer_context.name(name)
        self._size, self._offset, self._row_order, self.eps = size, config.weight_offset, row_order, config.eps
        self._start = self._tp.rank * num_parts // self._tp.size * (size // num_parts)
        dtype = torch.float32 if self._offset else None
        self.weight = layer_context.parameter(size // num_parts, dtype=dtype)

    def apply_(self, x: torch.Tensor) -> None:
        """In place: x [num_tokens, this rank's heads * head_dim], may be strided."""
        if self._tp.size == 1:
            self._ops.rms_norm(x, self.weight, self.eps, out=x)
            return
        x32 = x.float()
        mean = x32.square().mean(-1, keepdim=True)  # replicated heads count evenly: all parts have the same size
        if (wait := self._tp.begin_all_reduce(mean)) is not None:
            wait()
        scale = torch.rsqrt(mean / self._tp.size + self.eps)
        x.copy_(x32 * scale * self.weight.float())

    def weight_parts(self) -> list[WeightPart]:
        return [
            WeightPart(
                name=f"{self._name}.weight",
                shape=(self._size,),
                target=self.weight,
                start=self._start,
                add=self._offset,
                row_order=self._row_order,
            )
        ]


@dataclass(frozen=True, slots=True)
class SublayerNorms:
    """The norms of attention or an MLP, and how its output is added to the residual stream."""

    before: Norm | None  # of its input
    after: Norm | None = None  # of its output
    multiplier: float = 1.0  # of its output (Granite)
    adds_as_is: bool = field(init=False)  # whether the output is added as it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "adds_as_is", self.after is None and self.multiplier == 1.0)

    def add(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] each -> the residual stream with the whole output, which all ranks have."""
        if self.after is not None:
            return self.after.add_to(hidden, output, self.multiplier)
        return torch.add(hidden, output, alpha=self.multiplier)
