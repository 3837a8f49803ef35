"""Which experts the tokens of a benchmark pick. Floors count those that a step reads, so that they are to be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import Any

import torch
from torch import nn

from minisgl_backend.kernels.moe.call import Picked
from minisgl_backend.kernels.moe.mixtures import MixtureKernels

_LEAST_TOKENS = 256  # of a pass whose tokens stand for those of decode steps
_LARGE = 64  # factor of embeddings
_DRAWS = 8  # of each batch size from a pass


def draw_uniformly(model: nn.Module) -> None:
    """Lets random weights spread tokens over experts: what layers add to all tokens alike, biases and means of
    activations, would outweigh what makes tokens differ, and all would pick the same."""
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data.mul_(_LARGE)
        elif name.endswith("bias"):
            parameter.data.zero_()


class Drawn:
    """Counts the experts that tokens of eager passes pick, layer by layer."""

    def __init__(self, batches: Sequence[int]) -> None:
        self._found: dict[int, list[int]] = {batch: [] for batch in batches}

    def add(self, ids: torch.Tensor) -> None:
        """ids [num_tokens, experts per token], of one layer."""
        if len(ids) < _LEAST_TOKENS:
            return
        for batch, found in self._found.items():
            for _ in range(_DRAWS):
                tokens = torch.randint(0, len(ids), (batch,), device=ids.device)
                found.append(ids[tokens].unique().numel())

    @property
    def distinct(self) -> dict[int, float]:
        """By number of tokens: the experts of a layer that they pick together, on average."""
        return {batch: round(mean(found), 2) for batch, found in self._found.items() if found}


@contextmanager
def recorded(batches: Sequence[int]) -> Iterator[Drawn]:
    """Counts in all passes meanwhile that are not captured."""
    drawn = Drawn(batches)

    def counting(of: Callable[..., Picked]) -> Callable[..., Picked]:
        def counted(*given: Any, **named: Any) -> Picked:
            picked = of(*given, **named)
            drawn.add(picked.ids)
            return picked

        return counted

    kinds: list[Any] = [kind for kind in (MixtureKernels, *MixtureKernels.__subclasses__()) if "route" in vars(kind)]
    before = [(kind, kind.route) for kind in kinds]
    for kind, of in before:
        kind.route = counting(of)
    try:
        yield drawn
    finally:
        for kind, of in before:
            kind.route = of
