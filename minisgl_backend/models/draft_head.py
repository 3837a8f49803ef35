"""A head: a layer that drafts tokens from a model's hidden states (EAGLE-3, MTP).

At position p it is given the model's hidden states of the token at p and the token at p + 1, and says the token at
p + 2. What its layer keeps of position p is in the slot of position p. For the drafts behind the first, its own hidden
state stands in the place of the model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.weights import WeightedLayer
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.weights.parts import WeightPart


class DraftHead(nn.Module, ABC):
    """One rank's. Its modules are its own: those that it shares with the model are not among them."""

    config: ModelConfig  # of one layer; `vocab_size` is the model's
    states_size: int  # numbers of the model's hidden states, of one token

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The model's states [num_tokens, states_size] -> [num_tokens, hidden_size], as `forward` takes them."""
        return states

    @abstractmethod
    def keep(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores what is kept of these positions; slots int [num_tokens], the others as of `forward`."""

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Combined states, or the head's own of the draft before, and the tokens behind them.

        token_ids int [num_tokens], hidden [num_tokens, hidden_size], positions int [num_tokens]: of the hidden states
        -> logits of the tokens that it can draft, [num_tokens, n], and the hidden states for the next draft,
        [num_tokens, hidden_size].
        """

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, tokens that it can draft] -> those of the model's tokens, [n, vocab_size]: the lowest number for
        what the head cannot draft."""
        return logits

    @abstractmethod
    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        """From now on attention reads and writes this pool, whose one layer is the head's."""

    @abstractmethod
    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        """As of `CausalLM`."""

    def weight_parts(self) -> list[WeightPart]:
        """All that it needs of a checkpoint."""
        layers = (module for module in self.modules() if isinstance(module, WeightedLayer))
        return [part for layer in layers for part in layer.weight_parts()]

    def fill_with_noise(self) -> None:
        """In place of a checkpoint's weights: the same at every start."""
        generator = torch.Generator(device=next(self.parameters()).device).manual_seed(0)
        for module in self.modules():
            if isinstance(module, WeightedLayer):
                module.fill_with_noise(generator)
