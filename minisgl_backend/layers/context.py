"""Context of one forward pass: the KV slots of its tokens, and how it attends.

Built for every step and passed down as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from minisgl_backend.attention.pass_attention import PassAttention


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


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """Tokens are in step order: prefill first, decode after them."""

    slots: tuple[torch.Tensor, ...]  # by cache group, int [num_tokens] on the device: slots of the tokens in the pool
    attention: PassAttention
    logits_indices: torch.Tensor | None = None  # int [num_logits], tokens to return; None: all of them
    is_warm_up: bool = False  # runs only the layers of `decoder.warm_up_layers`; the output is meaningless
    # The pass is captured, or warms up one that is: it launches the same kernels in each replay.
    captured: bool = False
    aux: AuxStates | None = None
