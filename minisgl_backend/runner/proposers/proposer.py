"""Interface of proposers on the device, for speculative decoding.

A proposer has its own steps (`StepPlan.num_proposed`) between two of the model's: the scheduler plans one when the
model's previous step is committed, and the tokens come back with its result. So lengths, pages and ranks are as in
every other plan, and the proposed tokens are known on the host, where grammars check them.

The keys and values of its layers are in the model's pool, after the model's layers: a page holds those of both, so that
leases, prefix cache and preemption serve both. A token has the same slot in all layers.

Its layers, where it has any, get the keys and values of earlier tokens in one of two ways, by its row of
`speculative_config.METHODS` (`catches_up`):

* it catches up: its own steps include the tokens that it has not seen (`StepPlan.prefill`, and decode entries after the
  proposing ones): prompts, cached prefixes, and tokens that were sampled while it was off;
* or it observes: `observe` is called in each of the model's steps, with the hidden states of all tokens that it
  requests (`aux_states`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.config import EngineConfig
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import AuxStates
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import GraphRunner
from minisgl_backend.runner.step_tensors import StepTensors


class DeviceProposer(ABC):
    """One per rank; all ranks call the same methods in the same order. Its proposals may be wrong: they only affect
    speed. A class that a row of `speculative_config.METHODS` names is constructed from a `ProposerContext`."""

    def __init__(self, spec: AttentionSpec | None = None) -> None:
        """`spec`: of its layers in the pool; None: it has none. Sequences, pages and rows are those of the model."""
        self.places = () if spec is None else spec.places
        self._graphs: GraphRunner | None = None  # its captured passes; set by `prepare`

    @classmethod
    def read_draft_model(
        cls, config: EngineConfig, folder: Path, target: ModelConfig, target_dir: Path
    ) -> ModelConfig | None:
        """The config of the model that its layers are, read before anything is loaded; None: it has no layers in the
        pool. `folder`: that of the option's `model`; the target's for methods that take none.

        Raises ConfigError for a model that does not fit the target, in words that follow "cannot propose: ".
        """
        return None

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Numbers of decode entries, ascending, for which the first pass of its steps is captured; smaller ones are
        padded."""
        return () if self._graphs is None else self._graphs.sizes

    def bind(self, pool: KVPool, builder: BatchBuilder) -> None:  # noqa: B027
        """Binds its layers to this pool, which has the layers of `spec` only, and its steps to this builder. May be
        called again with others."""

    def prepare(self, graphs: GraphRunner | None, longest_prefill: int) -> None:  # noqa: B027
        """Chooses kernels, for steps with up to `longest_prefill` unseen tokens, and captures its passes in `graphs`,
        where given. Called once, after `bind`."""

    @abstractmethod
    def propose(self, step: StepTensors) -> torch.Tensor:
        """Computes one of its steps: int32 [num_proposed, num_proposing or more], the tokens at the positions
        `kv_lens`, `kv_lens + 1`, ... of the proposing rows, all in the vocabulary and the same on all ranks.

        `step.decode` has the proposing rows first: the input of each is its sequence's last token, at position
        `kv_lens - 1`. There are pages for the keys and values of all tokens but the last one proposed.
        """

    def aux_states(self, num_tokens: int) -> AuxStates | None:
        """Buffers in which a pass of the model over `num_tokens` leaves the states for `observe`; None: it does not
        observe."""
        return None

    def observe(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:  # noqa: B027
        """Called after the model has computed these tokens, int32 [num_tokens] each, and before the proposer's own
        steps; also inside captured passes. states: of `aux_states`, [num_tokens, len(layers) * hidden_size]."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """Its weights on this rank, without those that it shares with the model."""
        return ()

    def close(self) -> None:
        """Frees the captured graphs. They may hold collectives, so this comes before the process group is destroyed."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.close()
