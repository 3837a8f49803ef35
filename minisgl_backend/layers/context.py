"""Context of one forward pass: the KV slots of its tokens, and attention's plan.

Built for every step and passed down as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.kernels.ops import QKNormRope


@dataclass(frozen=True, kw_only=True)
class AuxStates:
    """Additional hidden states that a pass returns, for drafting (EAGLE-3, MTP)."""

    # In any order: the inputs of these layers (the whole residual stream). The number of layers stands for the states
    # after the final norm.
    layers: tuple[int, ...]
    out: torch.Tensor  # [num_tokens, len(layers) * hidden_size], for all tokens of the pass, which writes it

    def by_layer(self) -> dict[int, list[torch.Tensor]]:
        """The parts of `out` by layer, [num_tokens, hidden_size] each."""
        found: dict[int, list[torch.Tensor]] = {}
        for layer, part in zip(self.layers, self.out.chunk(len(self.layers), dim=1), strict=True):
            found.setdefault(layer, []).append(part)
        return found


class EagerPiece(Protocol):
    """A part of a mixer that passes with prompts which are captured leave out, like attention: what it launches differs
    from step to step. Decode steps are captured with it inside."""

    @property
    def shape_out(self) -> tuple[int, ...]:
        """Of one token's output, which has its input's dtype."""

    def run_into(self, x: torch.Tensor, slots: tuple[torch.Tensor, ...], plan: PairPlan, out: torch.Tensor) -> None:
        """x [num_tokens, ...] -> out [num_tokens, *shape_out]; slots: of the tokens, as in `ForwardContext`; plan: of
        the step."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext(ABC):
    """Tokens are in step order: prefill first, decode after them."""

    slots: tuple[torch.Tensor, ...]  # by cache group, int [num_tokens] on the device: slots of the tokens in the pool
    logits_indices: torch.Tensor | None = None  # int [num_logits], tokens to return; None: all of them
    is_warm_up: bool = False  # runs only the layers of `decoder.warm_up_layers`; the output is meaningless
    # The pass is captured, or warms up one that is: it launches the same kernels in each replay.
    captured: bool = False
    overwrites: bool = False  # each call of `attend` or `run` overwrites the output of the one before
    aux: AuxStates | None = None

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """q [num_tokens, num_q_heads, q_head_dim], rotated; the keys and values of these tokens are stored already.

        Returns attention's output, [num_tokens, num_q_heads, v_head_dim].
        """

    def run(self, piece: EagerPiece, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, ...] -> the piece's output, [num_tokens, *shape_out]."""
        raise NotImplementedError(f"{type(self).__name__} has attention alone")

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        """Whether `attend_with_rope` serves this step, and is worth it."""
        return False

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        """`Ops.rope_store` and `attend` in one kernel: qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]
        -> [num_tokens, num_q_heads, head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not rotate")


@dataclass(frozen=True, kw_only=True)
class EagerContext(ForwardContext):
    """Attends immediately, with this step's plan."""

    attention: AttentionPair
    plan: PairPlan

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        return self.attention.attend(layer, q, self.plan)

    def run(self, piece: EagerPiece, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((len(x), *piece.shape_out))
        piece.run_into(x, self.slots, self.plan, out)
        return out

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        return self.attention.fuses_rope(layer, self.plan)

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        return self.attention.attend_with_rope(layer, qkv, rotation, self.plan)
