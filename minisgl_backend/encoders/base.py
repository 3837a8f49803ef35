"""What the runner calls of an encoder. One image at a time: its vectors do not depend on others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from minisgl_backend.layers.encoder_config import EncoderConfig

State = Any  # of an image between two slices; the encoder's own


class TimedCall(NamedTuple):
    """Some parts of a layer that sees whole tiles, of an image of noise."""

    parts: int
    seen: int  # patches that one attends to
    run: Callable[[], None]


class Encoder(nn.Module, ABC):
    """Made of its config and a `LayerContext`."""

    config: EncoderConfig

    @abstractmethod
    def begin(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> State:
        """All before the layers. pixels: uint8 [tiles, height, width, 3] on the device; grid: `Content.grid`."""

    @abstractmethod
    def run(self, state: State, first: int, last: int) -> None:
        """Units `first` to `last` - 1: layers, where a layer is not cut into parts (`step.num_parts`)."""

    @abstractmethod
    def finish(self, state: State) -> torch.Tensor:
        """All behind the layers: [num_vectors, config.width]; beside each vector those of the planes."""

    def derive_weights(self) -> None:
        """Computes what it derives from weights. Called when all are loaded."""

    def timed_calls(self) -> Iterable[TimedCall]:
        """What is timed at start, one by one, of images of two sizes where it takes several; (): it has no calls of one
        layer."""
        return ()

    def encode(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """All of it at once."""
        return self.encode_all([(pixels, grid)])[0]

    def encode_all(self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]) -> list[torch.Tensor]:
        """Each image's vectors, from its pixels and grid; all in one call where the encoder can."""
        found = []
        for pixels, grid in images:
            state = self.begin(pixels, grid)
            self.run(state, 0, self.config.num_layers)
            found.append(self.finish(state))
        return found
