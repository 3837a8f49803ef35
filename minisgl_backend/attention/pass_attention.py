"""How the mixers of one forward pass attend, and run what else captured passes leave out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.kernels.ops import QKNormRope


class EagerPiece(Protocol):
    """A part of a mixer that captured passes with prompts leave out, like attention: what it launches differs from step
    to step. Decode steps are captured with it inside."""

    @property
    def shape_out(self) -> tuple[int, ...]:
        """Of one token's output, which has its input's dtype."""

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: Any, out: torch.Tensor) -> None:
        """x [num_tokens, ...] -> out [num_tokens, *shape_out]; slots: of the tokens, by cache group; plan: the step's
        `PairPlan`."""


class PassAttention(ABC):
    overwrites: bool = False  # each call overwrites the output of the one before

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """q [num_tokens, num_q_heads, q_head_dim], rotated; the keys and values of these tokens are stored already.

        Returns attention's output, [num_tokens, num_q_heads, v_head_dim].
        """

    def run(self, piece: EagerPiece, x: torch.Tensor, slots: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """x [num_tokens, ...] -> the piece's output, [num_tokens, *shape_out]; slots: of the tokens, by cache group."""
        raise NotImplementedError(f"{type(self).__name__} has attention alone")

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        """Whether `attend_with_rope` serves this step, and is worth it."""
        return False

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        """`Ops.rope_store` and `attend` in one kernel: qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]
        -> [num_tokens, num_q_heads, head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not rotate")
