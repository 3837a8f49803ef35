"""How many states of rows a start makes room for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start.runtime_config import RuntimeConfig

# On a GPU: a decode step reads half a page of every row besides its state, and folds a page into it once a page.
PAGE_SIZE = 32
CACHED = 4  # where memory is small: a slot for the prefix cache for so many of running rows
SHARE = 2  # states and tails take at most one part of so many of what weights and steps leave


class StateRoom(NamedTuple):
    """Of one rank."""

    layout: StateLayout
    num_slots: int
    tail_bytes: int  # of one row
    num_rows: int

    @property
    def num_bytes(self) -> int:
        """Of all slots, slot 0 included, and all tails."""
        return (self.num_slots + 1) * self.layout.bytes_per_slot + self.num_rows * self.tail_bytes

    def pool(self, runtime: RuntimeConfig, device: torch.device) -> StatePool:
        return StatePool(
            self.layout,
            page_size=runtime.page_size,
            max_drafts=_most_drafts(runtime),
            num_slots=self.num_slots,
            num_rows=self.num_rows,
            device=device,
        )


def least_states(runtime: RuntimeConfig, model: ModelConfig) -> StateRoom | None:
    """For steps that keep nothing; None: the model has no states."""
    states = (layer.mixer.state for layer in model.layers)
    layout = StateLayout.of(states, getattr(torch, runtime.dtype), runtime.config.tp)
    if layout is None:
        return None
    tail = layout.bytes_per_row(runtime.page_size, _most_drafts(runtime))
    return StateRoom(layout, num_slots=1, tail_bytes=tail, num_rows=runtime.most_decode_entries + 1)


def choose_states(runtime: RuntimeConfig, model: ModelConfig, left: int) -> StateRoom | None:
    """A slot for every running sequence, and as many for the prefix cache, fewer where memory is small.

    left: bytes that weights and the largest steps leave to states and pages. Raises ConfigError where they cannot hold
    the states of max_running_requests sequences.
    """
    least = least_states(runtime, model)
    if least is None:
        return None
    most = runtime.config.max_running_requests
    fitting = (left // SHARE - least.num_rows * least.tail_bytes) // least.layout.bytes_per_slot - 1
    needed = most + max(1, most // CACHED)
    if fitting < needed:
        each = least.layout.bytes_per_slot * (1 + 1 / CACHED) + least.tail_bytes
        raise ConfigError(
            f"max_running_requests is {most}; allowed for {model.architecture} in this memory: "
            f"{max(0, int((left // SHARE) / each) - 2)} or fewer, since a sequence has a state of "
            f"{least.layout.bytes_per_slot >> 20} MiB; or raise memory_ratio or tp"
        )
    return least._replace(num_slots=min(2 * most, fitting))


def _most_drafts(runtime: RuntimeConfig) -> int:
    speculation = runtime.config.speculation
    return 0 if speculation is None else speculation.most_drafts
