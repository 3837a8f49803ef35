"""What the runner calls of an encoder. One image at a time: its vectors do not depend on others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from minisgl_backend.layers.encoder_config import EncoderConfig

State = Any  # of an image between two slices; the encoder's own


class Encoder(nn.Module, ABC):
    """Made of its config and a `LayerContext`."""

    config: EncoderConfig

    @abstractmethod
    def begin(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> State:
        """All before the layers. pixels: uint8 [tiles, height, width, 3] on the device; grid: `Content.grid`."""

    @abstractmethod
    def run(self, state: State, first: int, last: int) -> None:
        """Layers `first` to `last` - 1."""

    @abstractmethod
    def finish(self, state: State) -> torch.Tensor:
        """All behind the layers: [num_vectors, config.width]; beside each vector those of the planes."""

    def derive_weights(self) -> None:
        """Computes what it derives from weights. Called when all are loaded."""

    def encode(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """All of it at once."""
        state = self.begin(pixels, grid)
        self.run(state, 0, self.config.num_layers)
        return self.finish(state)
