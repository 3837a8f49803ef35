"""What proposes tokens on the device.

A proposer has steps of its own (`StepPlan.num_proposed`), between two of the model's: the scheduler plans one when the
model's step before is committed, and the tokens come back with its result. So lengths, pages and ranks are those of
every other plan, and what is proposed is known on the host, where grammars look at it.

Its layers' keys and values are in the model's pool, behind the model's layers: a page holds those of both, and leases,
prefix cache and preemption are one system. A token's are at the same slot for both.

What its layers know of earlier tokens comes in one of two ways, which `speculation.create.PROPOSERS` names by method:

* it catches up: its own steps bring the tokens that it has not seen (`StepPlan.prefill`, and decode entries behind the
  proposing ones), be it prompts, cached prefixes or what was sampled while it was off;
* or it looks on: `observe` is called in each of the model's steps, with those hidden states of all tokens that it has
  asked for (`aux_states`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kv.pool import KVPool
from minisgl_backend.layers.context import AuxStates
from minisgl_backend.runner.batch import BatchBuilder
from minisgl_backend.runner.graphs.whole import GraphRunner
from minisgl_backend.runner.step_tensors import StepTensors


class DeviceProposer(ABC):
    """One for each rank; all of a step's ranks call the same methods in the same order. May be wrong: what it proposes
    decides about speed alone."""

    def __init__(self, spec: AttentionSpec) -> None:
        """`spec`: of its layers, by which the pool keeps theirs. Sequences, pages and rows are those of the model."""
        self.spec = spec

    @property
    @abstractmethod
    def graph_sizes(self) -> tuple[int, ...]:
        """Decode entries, ascending, of the first pass of its steps that are captured: smaller ones are padded."""

    @abstractmethod
    def bind(self, pool: KVPool, builder: BatchBuilder) -> None:
        """From now on its layers read and write this pool, whose layers are those of `spec` alone, and its steps are
        staged by this builder. May be called once more, with others."""

    @abstractmethod
    def prepare(self, graphs: GraphRunner | None, longest_prefill: int) -> None:
        """Chooses kernels, for steps of up to `longest_prefill` tokens that it has not seen, and captures its passes in
        `graphs`, where there are any. Called once, when it is bound."""

    @abstractmethod
    def propose(self, step: StepTensors) -> torch.Tensor:
        """Computes one of its steps: int32 [num_proposed, num_proposing or more], the tokens at the positions
        `kv_lens`, `kv_lens + 1`, ... of the proposing rows, all in the vocabulary and the same on all ranks.

        `step.decode` has the proposing rows first: the input of each is its sequence's last token, at position
        `kv_lens - 1`. There are pages for the keys and values of all tokens but the last one proposed.
        """

    def aux_states(self, num_tokens: int) -> AuxStates | None:
        """Where one of the model's passes over `num_tokens` leaves what `observe` is given; None: it does not look
        on."""
        return None

    def observe(self, rows: torch.Tensor, positions: torch.Tensor, states: torch.Tensor) -> None:  # noqa: B027
        """The model has computed these tokens, int32 [num_tokens] each; the proposer's own steps come behind that.
        Inside of captured passes, too. states: of `aux_states`, [num_tokens, len(layers) * hidden_size]."""

    @abstractmethod
    def parameters(self) -> Iterable[torch.Tensor]:
        """Its weights on this rank, those that it shares with the model left out."""

    def close(self) -> None:  # noqa: B027
        """Frees the captured graphs, which may hold collectives: before the ranks part."""
