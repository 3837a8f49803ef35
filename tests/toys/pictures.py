"""A toy picture: some tokens of a row have vectors in place of embeddings, a plane is added behind one layer, and RoPE
counts the whole picture as one position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.layers.model_input import GivenVectors, ModelInput, Rotation
from minisgl_backend.layers.rotary import RopeTables


@dataclass(frozen=True)
class Picture:
    start: int  # true position of its first token
    vectors: torch.Tensor  # [length, hidden_size]
    plane: torch.Tensor | None = None  # likewise
    behind: int = 0  # the layer that the plane follows

    def rotated_by(self, positions: torch.Tensor) -> torch.Tensor:
        """What RoPE takes for true positions."""
        last = self.start + len(self.vectors) - 1
        return torch.where(positions > last, positions - last + self.start, positions.clamp(max=self.start))

    def shown(self, tokens: ModelInput, angles: RopeTables | None = None) -> ModelInput:
        """A pass over tokens of one row; `angles`: RoPE gets cosines and sines and no positions."""
        inside = (tokens.positions >= self.start) & (tokens.positions < self.start + len(self.vectors))
        rows, rotated = inside.nonzero()[:, 0], self.rotated_by(tokens.positions)
        chosen = tokens.positions[rows] - self.start
        planes = () if self.plane is None else ((self.behind, self.plane[chosen]),)
        rotation = Rotation(rotated)
        if angles is not None:
            rotation = Rotation(torch.arange(len(rotated)), tuple(one.cos_sin[rotated] for one in angles))
        given = GivenVectors(rows, self.vectors[chosen], planes) if len(rows) else None
        return tokens._replace(rotation=rotation, given=given)
