"""What a forward pass is given of its tokens, as one value."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_backend.layers.rotary import RopeTable


class GivenVectors(NamedTuple):
    """Vectors that some tokens have in place of an embedding, as those of images, and others that are added later."""

    rows: torch.Tensor  # int64 [k]: which of the pass's tokens
    vectors: torch.Tensor  # [k, hidden_size], to which the embedding's multiplier does not apply
    # (layer, vectors [k, hidden_size]): added to the residual stream behind that layer.
    planes: tuple[tuple[int, torch.Tensor], ...] = ()
    # bool [k, 1]: which of `vectors` are given, where `rows` are all tokens; what others have in planes is 0.
    is_given: torch.Tensor | None = None

    def placed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size] with the vectors in their places."""
        if self.is_given is not None:
            return torch.where(self.is_given, self.vectors, hidden)
        return hidden.index_copy(0, self.rows, self.vectors)


class Rotation(NamedTuple):
    """What RoPE rotates the tokens by, where it is not their true positions."""

    positions: torch.Tensor  # int [num_tokens]: rows of the tables
    # By number of the model's tables (`layers.rotary.RopeTable`): cosines and sines of this pass alone, float32
    # [at least 1 + the largest position, head_dim]; (): the model's own.
    tables: tuple[torch.Tensor, ...] = ()
    # int32 [max_rows]: where each token's position is the true one and its row's number here; None: elsewhere.
    shifts: torch.Tensor | None = None

    def by(self, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, and each token's row of them, for a layer with this table."""
        return self.tables[table.number] if self.tables else table.cos_sin, self.positions


class ModelInput(NamedTuple):
    """Tokens in step order: prefill first, decode after them."""

    token_ids: torch.Tensor  # int [num_tokens]
    positions: torch.Tensor  # int [num_tokens], the true ones
    rotation: Rotation | None = None  # None: by the true positions
    given: GivenVectors | None = None
    by_row: torch.Tensor | None = None  # [num_tokens, ...], goes with the residual stream (`Residual.by_row`)

    @property
    def is_plain(self) -> bool:
        """Whether it is token ids and positions alone, of which the rotation may have others."""
        return (self.rotation is None or not self.rotation.tables) and self.given is None and self.by_row is None
