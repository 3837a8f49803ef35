"""Inputs and outputs of eager pieces at fixed addresses, for passes that are captured around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.attention.pass_attention import EagerPiece


@dataclass(frozen=True)
class AttentionPiece:
    """One layer's attention."""

    layer: AttentionLayer
    attention: AttentionPair

    @property
    def shape_out(self) -> tuple[int, int]:
        group = self.attention.spec.groups[self.layer.group]
        return group.num_q_heads, group.v_head_dim

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: PairPlan, out: torch.Tensor) -> None:
        self.attention.attend_into(self.layer, x, plan, out)


class Crossing(NamedTuple):
    """An eager piece between two graphs."""

    piece: EagerPiece
    pair: int  # which of the boundary's pairs of buffers it has
    x: torch.Tensor
    out: torch.Tensor


class Boundary:
    """A pair of buffers for each shape of an input and its output; pieces alike share one, since they run one after the
    other."""

    def __init__(self, num_tokens: int) -> None:
        """For passes of up to this many tokens, of which the first has all shapes, and is not captured."""
        self._num_tokens = num_tokens
        self._numbers: dict[tuple[object, ...], int] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.only_attention = True  # of what has crossed it

    def crossing(self, piece: EagerPiece, x: torch.Tensor) -> Crossing:
        """That of an input, [num_tokens, ...], and its place."""
        self.only_attention &= isinstance(piece, AttentionPiece)
        key = x.shape[1:], piece.shape_out, x.dtype
        number = self._numbers.setdefault(key, len(self._pairs))
        if number == len(self._pairs):
            buffer, out = (x.new_zeros((self._num_tokens, *shape)) for shape in (x.shape[1:], piece.shape_out))
            self._pairs.append((buffer, out))
        buffer, out = self._pairs[number]
        return Crossing(piece, number, buffer[: len(x)], out[: len(x)])

    def first(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the first rows of each pair."""
        return [(buffer[:num_tokens], out[:num_tokens]) for buffer, out in self._pairs]

    def clear_outputs(self, begin: int, end: int) -> None:
        """Sets these rows of all outputs to zero."""
        for _, out in self._pairs:
            out[begin:end].zero_()
