"""Linear layers, split over tensor-parallel ranks by their outputs (column) or their inputs (row).

A column layer followed by a row layer needs one all-reduce, at the end: the scheme of Megatron-LM (Shoeybi et al.,
2019). `AllReduce` says how.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from minisgl_backend.layers.norm import Norm, SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext, WeightedLayer
from minisgl_backend.weights.parts import WeightPart


class ColumnParallelLinear(WeightedLayer):
    """One or more linear layers of the same input, stacked in one weight; each output is split evenly over the ranks.

    `outputs` maps the name of each in the checkpoint to its full output size; `parts` names those that are split into
    fewer parts than there are ranks, of which several neighbours have the same one then. `row_orders`: see
    `WeightPart.row_order`.
    """

    def __init__(
        self,
        input_size: int,
        outputs: Mapping[str, int],
        bias: bool,
        layer_context: LayerContext,
        *,
        parts: Mapping[str, int] | None = None,
        row_orders: Mapping[str, tuple[int, ...] | None] | None = None,
    ) -> None:
        super().__init__()
        self._layer_context = layer_context
        self._outputs = dict(outputs)
        self._parts = dict.fromkeys(outputs, layer_context.tp.size) | dict(parts or {})
        self._row_orders = dict(row_orders or {})
        local = sum(size // self._parts[name] for name, size in outputs.items())
        self.weight = layer_context.parameter(local, input_size)
        self.bias = layer_context.parameter(local) if bias else None

    def forward(
        self, residual: Residual, norm: Norm | None, *, activation: str | None = None
    ) -> tuple[Residual, torch.Tensor]:
        """The residual stream with all that was to be added, and the outputs for its norm, [num_tokens, local outputs].

        norm: None: of the residual stream itself. activation: as in `Ops.linear`.
        """
        residual, x, unapplied = residual.before_gemm(norm)
        if unapplied is None:
            return residual, self.of(x, activation=activation)
        return residual, self._layer_context.ops.linear(
            x, self.weight, norm_weight=unapplied.weight, eps=unapplied.eps, bias=self.bias, activation=activation
        )

    def of(self, x: torch.Tensor, *, activation: str | None = None) -> torch.Tensor:
        """x [num_tokens, inputs] -> [num_tokens, local outputs]."""
        return self._layer_context.ops.linear(x, self.weight, bias=self.bias, activation=activation)

    def into(self, residual: Residual, norm: Norm | None, out: torch.Tensor) -> Residual:
        """`forward` with the outputs written to `out`."""
        residual, x = residual.settled(norm)
        self._layer_context.ops.linear_into(x, self.weight, out)
        if self.bias is not None:
            out += self.bias
        return residual

    def weight_parts(self) -> list[WeightPart]:
        context, parts, row = self._layer_context, [], 0
        for name, size in self._outputs.items():
            local = size // self._parts[name]
            start = context.tp.rank * self._parts[name] // context.tp.size * local
            for kind, param in (("weight", self.weight), ("bias", self.bias)):
                if param is not None:
                    full, shape = context.name(f"{name}.{kind}"), (size, *param.shape[1:])
                    parts.append(
                        WeightPart(
                            name=full,
                            shape=shape,
                            target=param[row : row + local],
                            start=start,
                            row_order=self._row_orders.get(name),
                        )
                    )
            row += local
        return parts

    def gemm_weights(self) -> list[torch.Tensor]:
        # A GEMM with a bias stays with torch, which adds it on the way.
        return [self.weight] if self.bias is None else []


class RowParallelLinear(WeightedLayer):
    """A linear layer whose input is split over the ranks; the ranks' partial results are summed."""

    def __init__(self, input_size: int, output_size: int, name: str, bias: bool, layer_context: LayerContext) -> None:
        super().__init__()
        self._layer_context = layer_context
        self._name = name
        self._input_size = input_size
        self.weight = layer_context.parameter(output_size, input_size // layer_context.tp.size)
        self.bias = layer_context.parameter(output_size) if bias else None

    def forward(self, residual: Residual, x: torch.Tensor, norms: SublayerNorms) -> Residual:
        """The residual stream, which is settled, plus x [num_tokens, local inputs] @ weight.T of all ranks."""
        return residual.plus(lambda added_to: self.part(x, added_to), norms)

    def part(self, x: torch.Tensor, added_to: torch.Tensor | None) -> torch.Tensor:
        """x [num_tokens, local inputs], added_to [num_tokens, outputs] -> added_to, which may be overwritten, plus this
        rank's part of x @ weight.T."""
        bias = self.bias if self._layer_context.tp.rank == 0 else None  # which must enter the sum once
        return self._layer_context.ops.linear(x, self.weight, bias=bias, residual=added_to)

    def weight_parts(self) -> list[WeightPart]:
        output_size, local = self.weight.shape
        context, shape = self._layer_context, (output_size, self._input_size)
        start, name = context.tp.rank * local, context.name(self._name)
        parts = [WeightPart(name=f"{name}.weight", shape=shape, target=self.weight, dim=1, start=start)]
        if self.bias is not None:
            parts.append(WeightPart(name=f"{name}.bias", shape=(output_size,), target=self.bias))
        return parts

    def gemm_weights(self) -> list[torch.Tensor]:
        return [self.weight] if self.bias is None else []
