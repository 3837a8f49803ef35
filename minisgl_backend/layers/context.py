"""What one forward pass needs besides its tokens: where keys and values go, and how attention was planned.

Built anew for every step and passed down as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from minisgl_backend.attention.layer import AttentionLayer
from minisgl_backend.attention.pair import AttentionPair, PairPlan
from minisgl_backend.kernels.ops import QKNormRope


@dataclass(frozen=True, kw_only=True)
class AuxStates:
    """Hidden states that a pass is asked for besides those that logits are computed from (EAGLE-3, MTP)."""

    # In any order: the states that these layers are given, all that was added included. The number of layers stands
    # for those behind the final norm.
    layers: tuple[int, ...]
    out: torch.Tensor  # [num_tokens, len(layers) * hidden_size], of all tokens of the pass; written by it

    def by_layer(self) -> dict[int, list[torch.Tensor]]:
        """Where those of each layer go, [num_tokens, hidden_size] each."""
        found: dict[int, list[torch.Tensor]] = {}
        for layer, part in zip(self.layers, self.out.chunk(len(self.layers), dim=1), strict=True):
            found.setdefault(layer, []).append(part)
        return found


@dataclass(frozen=True, kw_only=True)
class ForwardContext(ABC):
    """Tokens are in step order: prefill first, decode after them."""

    slots: tuple[torch.Tensor, ...]  # by cache group, int [num_tokens] on the device; where what is kept of tokens goes
    logits_indices: torch.Tensor | None = None  # int [num_logits], tokens that are asked for; None: all of them
    rehearses: bool = False  # only layers that launch other kernels than those before them; what comes out is noise
    # The pass is captured, or rehearses one that is: what it launches is the same in each replay.
    captured: bool = False
    aux: AuxStates | None = None

    @abstractmethod
    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        """q [num_tokens, num_q_heads, q_head_dim], rotated; what the layer keeps of these tokens is stored.

        Returns attention's output, [num_tokens, num_q_heads, v_head_dim].
        """

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        """Whether `attend_with_rope` serves this step, and is worth it."""
        return False

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        """`Ops.rope_store` and `attend` in one kernel: qkv [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]
        -> [num_tokens, num_q_heads, head_dim]."""
        raise NotImplementedError(f"{type(self).__name__} does not rotate")


@dataclass(frozen=True, kw_only=True)
class EagerContext(ForwardContext):
    """Attends at once, with what was planned for this step."""

    attention: AttentionPair
    plan: PairPlan

    def attend(self, layer: AttentionLayer, q: torch.Tensor) -> torch.Tensor:
        return self.attention.attend(layer, q, self.plan)

    def fuses_rope(self, layer: AttentionLayer) -> bool:
        return self.attention.fuses_rope(layer, self.plan)

    def attend_with_rope(self, layer: AttentionLayer, qkv: torch.Tensor, rotation: QKNormRope) -> torch.Tensor:
        return self.attention.attend_with_rope(layer, qkv, rotation, self.plan)
