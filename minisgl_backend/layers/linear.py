"""Linear layers, split over tensor-parallel ranks by their outputs (column) or their inputs (row).

A column layer followed by a row layer needs one all-reduce, at the end: the scheme of Megatron-LM (Shoeybi et al.,
2019). `AllReduce` says how. The weight's method (`weights.method`) computes the GEMM in its number format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.layers.lora import AdaptedWeight
from minisgl_backend.layers.norm import Norm, RMSNorm, SublayerNorms
from minisgl_backend.layers.residual import Residual
from minisgl_backend.layers.weights import LayerContext
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec


class AdaptedLinear(AdaptedWeight):
    """One linear weight."""

    method: LinearMethod

    @property
    def lora_spec(self) -> LinearSpec:
        return self.method.spec

    def try_adapters(self, slots: torch.Tensor) -> None:
        assert self.lora is not None, "it has room for adapters"
        method = self.method
        x = self.lora.factors.a.new_zeros(len(slots), method.spec.local_inputs)
        self.lora.multiply(method, x, slots, GemmCall(bias=method.added_bias))

    def numbers(self) -> torch.Tensor:
        return self.method.dequantized()


class ColumnParallelLinear(AdaptedLinear):
    """One or more linear layers with the same input, stacked in one weight; each output is split evenly over the ranks.

    `outputs` maps the name of each layer in the checkpoint to its full output size; `parts` names those that are split
    into fewer parts than there are ranks, where neighbouring ranks share a part. `row_orders`: see
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
        tp, orders = layer_context.tp, row_orders or {}
        split = dict.fromkeys(outputs, tp.size) | dict(parts or {})
        found = []
        for name, size in outputs.items():
            local = size // split[name]
            start = tp.rank * split[name] // tp.size * local
            full = layer_context.name(name)
            found.append(LinearOutput(name=full, size=size, start=start, local=local, row_order=orders.get(name)))
        self.method = layer_context.methods.linear(
            LinearSpec(outputs=tuple(found), input_size=input_size, local_inputs=input_size, bias=bias)
        )

    def forward(
        self, residual: Residual, norm: Norm | None, *, activation: str | None = None, feeds: object = None
    ) -> tuple[Residual, torch.Tensor]:
        """The settled residual stream, and the outputs for its norm, [num_tokens, local outputs].

        norm: None: the input is the residual stream itself. activation, feeds: see `GemmCall`.
        """
        residual, x, unapplied = residual.before_gemm(norm)
        slots = residual.by_row
        return residual, self.of(x, norm=unapplied, activation=activation, slots=slots, feeds=feeds)

    def of(
        self,
        x: torch.Tensor,
        *,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        slots: torch.Tensor | None = None,
        feeds: object = None,
    ) -> torch.Tensor:
        """x [num_tokens, inputs] -> the outputs for norm(x) (None: for x), [num_tokens, local outputs]. slots: of
        adapters, see `LoraSite`; None: no token has one. feeds: see `GemmCall`; not with slots, since the adapters of
        the weight that it is read its input in 16 bits."""
        method = self.method
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        fed = feeds if slots is None else None
        call = GemmCall(weight, eps, method.added_bias, activation=activation, feeds=fed)
        if slots is not None and self.lora is not None:
            return self.lora.multiply(method, x, slots, call, norm)
        return method.multiply(x, method.operand, call)

    def empty_outputs(self, num_tokens: int) -> torch.Tensor:
        """Uninitialised tensor for `into`, [num_tokens, local outputs]."""
        context, (size, _) = self._layer_context, self.method.spec.shape
        return torch.empty((num_tokens, size), dtype=context.dtype, device=context.device)

    def into(self, residual: Residual, norm: Norm | None, out: torch.Tensor) -> Residual:
        """`forward` with the outputs written to `out`."""
        residual, x = residual.settled(norm)
        self.method.apply_into(x, out)
        if residual.by_row is not None and self.lora is not None:
            self.lora.add_to(out, x, residual.by_row)
        return residual


class JoinedColumnParallelLinear(nn.Module):
    """As one `ColumnParallelLinear`, of layers whose weights differ in their number format: several, whose outputs
    follow one another."""

    def __init__(self, parts: Sequence[ColumnParallelLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._parts = tuple(parts)

    def forward(self, residual: Residual, norm: Norm | None) -> tuple[Residual, torch.Tensor]:
        residual, x = residual.settled(norm)
        return residual, self.of(x, residual.by_row)

    def of(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([part.of(x, slots=slots) for part in self._parts], dim=1)

    def empty_outputs(self, num_tokens: int) -> torch.Tensor:
        return torch.cat([part.empty_outputs(num_tokens) for part in self._parts], dim=1)

    def into(self, residual: Residual, norm: Norm | None, out: torch.Tensor) -> Residual:
        residual, outputs = self(residual, norm)
        out.copy_(outputs)
        return residual


def column_parallel(
    input_size: int, outputs: Mapping[str, int], layer_context: LayerContext
) -> ColumnParallelLinear | JoinedColumnParallelLinear:
    """Linear layers without biases with the same input, whose weights are stacked where they have one number format."""
    runs = layer_context.methods.alike([layer_context.name(name) for name in outputs])
    names, parts = iter(outputs), list[ColumnParallelLinear]()
    for length in runs:
        own = {name: outputs[name] for name in islice(names, length)}
        parts.append(ColumnParallelLinear(input_size, own, False, layer_context))
    return parts[0] if len(parts) == 1 else JoinedColumnParallelLinear(parts)


class RowParallelLinear(AdaptedLinear):
    """A linear layer whose input is split over the ranks; the ranks' partial sums are all-reduced."""

    def __init__(self, input_size: int, output_size: int, name: str, bias: bool, layer_context: LayerContext) -> None:
        super().__init__()
        tp, local = layer_context.tp, input_size // layer_context.tp.size
        output = LinearOutput(name=layer_context.name(name), size=output_size, start=0, local=output_size)
        self.method = layer_context.methods.linear(
            LinearSpec(
                outputs=(output,),
                input_size=input_size,
                input_start=tp.rank * local,
                local_inputs=local,
                bias=bias,
                adds_bias=tp.rank == 0,  # the bias must enter the sum once
            )
        )

    def forward(self, residual: Residual, x: torch.Tensor, norms: SublayerNorms) -> Residual:
        """The residual stream, which is settled, plus x [num_tokens, local inputs] @ weight.T summed over the ranks."""
        return residual.plus(lambda added_to: self.part(x, added_to, residual.by_row), norms)

    def part(self, x: torch.Tensor, added_to: torch.Tensor | None, slots: torch.Tensor | None = None) -> torch.Tensor:
        """x [num_tokens, local inputs], added_to [num_tokens, outputs] -> added_to, which may be overwritten, plus this
        rank's partial sum of x @ weight.T. slots: of adapters, as of `ColumnParallelLinear`."""
        method = self.method
        call = GemmCall(bias=method.added_bias, residual=added_to)
        if slots is not None and self.lora is not None:
            return self.lora.multiply(method, x, slots, call)
        return method.multiply(x, method.operand, call)
