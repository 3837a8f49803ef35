"""A module with parameters, as loading sees it."""

from __future__ import annotations

import torch
from torch import nn

from minisgl_backend.weights.parts import WeightPart

NOISE = 0.02  # standard deviation, about that of weights before their training


class WeightedLayer(nn.Module):
    """A module with parameters. All of them are filled through `weight_parts`, each element exactly once."""

    def weight_parts(self) -> list[WeightPart]:
        """What the layer needs of a checkpoint."""
        raise NotImplementedError

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Random weights of a plausible size in place of those of a checkpoint.

        Biases are noise too: the same number in all of them would soon be most of every token's hidden state, and a
        router would send all tokens to the same experts."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter.data.fill_(1.0)  # of norms, for example
            else:
                parameter.data.normal_(0.0, NOISE, generator=generator)


def fill_bias_with_noise(bias: torch.Tensor | None, generator: torch.Generator) -> None:
    """For `fill_with_noise` of layers whose other parameters need more than noise."""
    if bias is not None:
        bias.data.normal_(0.0, NOISE, generator=generator)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Uninitialised, and never in need of gradients."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
