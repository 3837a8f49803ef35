"""What captured passes of prompts with images read beside token ids and positions, at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl_backend.layers.model_input import GivenVectors, ModelInput, Rotation

# Tokens of such a pass: longer ones take a GPU longer than the host needs to launch their kernels one by one.
MOST_TOKENS = 1024


class ImageInputs:
    """Every token has a place for a vector, and for one of each plane; a mask says which are given."""

    def __init__(
        self, hidden_size: int, planes: Sequence[int], angles: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        """planes: layers behind which they are added; angles: sizes of a token's row in the model's tables, where
        rotations are by axis, else ()."""
        shape = MOST_TOKENS, hidden_size
        self._rows = torch.arange(MOST_TOKENS, device=device)
        self._places = self._rows.int()
        self._is_given = torch.zeros(MOST_TOKENS, 1, dtype=torch.bool, device=device)
        self._vectors = torch.zeros(shape, dtype=dtype, device=device)
        self._planes = tuple((layer, torch.zeros(shape, dtype=dtype, device=device)) for layer in planes)
        self._tables = tuple(torch.zeros(MOST_TOKENS, size, device=device) for size in angles)

    def serves(self, tokens: ModelInput) -> bool:
        """Whether they are tokens with images, few enough, and nothing else."""
        tables = tokens.rotation.tables if tokens.rotation is not None else ()
        alike = tokens.given is not None and tokens.by_row is None and len(tables) == len(self._tables)
        return alike and len(tokens.token_ids) <= MOST_TOKENS

    def fill(self, tokens: ModelInput, size: int) -> None:
        """For a pass of `size` tokens, of which the last are padding."""
        given = tokens.given
        assert given is not None, "only tokens with images are served"
        self._is_given[:size].zero_()
        self._is_given.index_fill_(0, given.rows, True)
        self._vectors.index_copy_(0, given.rows, given.vectors)
        for (_, mine), (_, plane) in zip(self._planes, given.planes, strict=True):
            mine[:size].zero_()
            mine.index_copy_(0, given.rows, plane)
        if tokens.rotation is not None:
            for mine, table in zip(self._tables, tokens.rotation.tables, strict=True):
                mine[: len(table)].copy_(table)

    def given(self, size: int) -> GivenVectors:
        planes = tuple((layer, plane[:size]) for layer, plane in self._planes)
        return GivenVectors(self._rows[:size], self._vectors[:size], planes, self._is_given[:size])

    def rotation(self, size: int) -> Rotation | None:
        """None: that of the positions."""
        return Rotation(self._places[:size], self._tables) if self._tables else None
