"""The adapters of one linear layer: what the factors of their slots add to its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.lora.reference import LoraFactors, LoraKernels, Norm

if TYPE_CHECKING:
    from minisgl_backend.weights.method import LinearMethod, LinearSpec


class LoraSite:
    """Beside one linear weight of a rank, split over the ranks as it is. Slots count from 1."""

    def __init__(self, factors: LoraFactors, kernels: LoraKernels) -> None:
        self.factors, self._kernels = factors, kernels

    def add_to(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
        """Adds to out [num_tokens, local outputs] what the adapters in `slots`, int32 [num_tokens], make of x
        [num_tokens, local inputs]."""
        self._kernels.add(out, x, slots, self.factors)

    def multiply(
        self, method: LinearMethod, x: torch.Tensor, slots: torch.Tensor, call: GemmCall, norm: Norm | None = None
    ) -> torch.Tensor:
        """What the weight of `method` makes of x [num_tokens, local inputs] as `call` says, with what the adapters in
        `slots` add before the activation. norm: the call's, as a function."""
        return self._kernels.linear(method.multiply, method.operand, x, slots, self.factors, call, norm)

    def add_rows(self, out: torch.Tensor, token_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Adds to out [num_tokens, outputs] what the adapters make of tokens, as an embedding's inputs are: each picks
        one column of A. token_ids int [num_tokens]."""
        hidden = self.factors.a[slots.long() - 1, :, token_ids]  # of another slot where there is none: it is not added
        self._kernels.expand(out, hidden.float(), slots, self.factors)


class AdaptedWeight(nn.Module):
    """What adapters may change: they add to its outputs. With adapters the residual stream's field by row is each
    token's slot."""

    lora: LoraSite | None = None  # None: no adapter changes it

    @property
    def lora_spec(self) -> LinearSpec:
        """Its outputs and inputs, of which this rank may have a part."""
        raise NotImplementedError

    def adapt(self, lora: LoraSite) -> None:
        """From now on."""
        self.lora = lora

    def try_adapters(self, slots: torch.Tensor) -> None:
        """Computes as many rows with the adapters in `slots`, so that kernels are compiled."""
        raise NotImplementedError

    def numbers(self) -> torch.Tensor:
        """The weight [outputs, inputs] of this rank; raises NotImplementedError where its format does not tell."""
        raise NotImplementedError
