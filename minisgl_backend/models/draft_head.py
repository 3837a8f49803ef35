"""A head: a layer that drafts tokens from a model's hidden states (EAGLE-3, MTP).

At position p its inputs are the model's hidden state of the token at p and the token at p + 1, and it predicts the
token at p + 2. The keys and values of its layer for position p are in the slot of position p. For drafts after the
first, its own hidden state replaces the model's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import ForwardContext
from minisgl_backend.layers.model_input import ModelInput
from minisgl_backend.layers.weights import WeightedLayer
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.loader import load_weights
from minisgl_backend.weights.method import process_weights_after_loading
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.parts import WeightPart, check_filled


class DraftHead(nn.Module, ABC):
    """The head on one rank. Its submodules do not include those that it shares with the model."""

    config: ModelConfig  # of one layer; `vocab_size` is the model's
    states_size: int  # size of the model's hidden states per token

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The model's states [num_tokens, states_size] -> [num_tokens, hidden_size], as `forward` takes them."""
        return states

    @abstractmethod
    def keep(self, tokens: ModelInput, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """Only stores keys and values (or latents) of these positions; slots int [num_tokens], the others as in
        `forward`."""

    @abstractmethod
    def forward(
        self, tokens: ModelInput, hidden: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass over combined states, or the head's own states of the previous draft, and the next tokens.

        hidden [num_tokens, hidden_size], at the positions of `tokens`, whose ids are those of the tokens that follow
        -> logits of the tokens that it can draft, [num_tokens, n], and the hidden states for the next draft,
        [num_tokens, hidden_size].
        """

    def to_target_vocab(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [n, draft vocabulary] -> logits of the model's vocabulary, [n, vocab_size], with the lowest number for
        tokens that the head cannot draft."""
        return logits

    @abstractmethod
    def bind_attention(self, spec: AttentionSpec, pool: KVPool) -> None:
        """Binds attention to this pool, whose one layer is the head's."""

    @abstractmethod
    def prepare(self, batch_sizes: Sequence[int], longest: int) -> None:
        """As of `CausalLM`."""

    def weight_parts(self) -> list[WeightPart]:
        """All tensors that it needs from a checkpoint."""
        layers = (module for module in self.modules() if isinstance(module, WeightedLayer))
        return [part for layer in layers for part in layer.weight_parts()]

    def load(self, checkpoint: Checkpoint | None, names: TensorNames, is_redundant: Callable[[str], bool]) -> None:
        """Called once, then it is ready to run; the last two arguments as of `load_weights`. None: dummy weights, the
        same at every start.

        Raises ConfigError naming tensors that are missing, unexpected or of another shape than config.json says.
        """
        parts, device = self.weight_parts(), next(self.parameters()).device
        check_filled(parts, self.named_parameters())
        if checkpoint is None:
            generator = torch.Generator(device=device).manual_seed(0)
            for module in self.modules():
                if isinstance(module, WeightedLayer):
                    module.fill_with_noise(generator)
        else:
            load_weights(
                parts,
                names,
                checkpoint,
                device,
                lambda done, total: None,
                model=self.config.architecture,
                is_redundant=is_redundant,
            )
        self.derive_weights()

    def derive_weights(self) -> None:
        """What follows from the weights once all are loaded."""
        process_weights_after_loading(self)
