"""How many states of rows a start makes room for."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import NamedTuple

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start.device import free_bytes
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.tensor_parallel import TensorParallel, device_of_rank
from minisgl_backend.weights.sizes import ITEM_BYTES, weight_bytes

log = logging.getLogger(__name__)

# On a GPU: a decode step reads half a page of every row besides its state, and folds a page into it once a page.
PAGE_SIZE = 32
CACHED = 4  # where memory is small: a slot for the prefix cache for so many of running rows
CPU_BYTES = 1 << 30  # most for states on a CPU, whose memory is shared with everything else
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

    def most_rows(self, left: int) -> int:
        """Sequences that can run where so many bytes are left, with their share of slots for the prefix cache."""
        each = self.layout.bytes_per_slot * (1 + 1 / CACHED) + self.tail_bytes
        return int((left // SHARE) / each) - 2

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


def fit_rows(runtime: RuntimeConfig, model: ModelConfig, tp: TensorParallel | None = None) -> RuntimeConfig:
    """The settings with as many running sequences as memory has states for, the same on all ranks: fewer than
    max_running_requests are told. To be called before weights are loaded. Raises ConfigError for a model without."""
    least, config = least_states(runtime, model), runtime.config
    if least is None and config.num_state_slots is not None:
        raise ConfigError(
            f"num_state_slots is {config.num_state_slots}; allowed for {model.architecture}: unset, since it has no "
            "states beside its pages"
        )
    if least is None:
        return runtime
    asked = config.max_running_requests
    if config.num_state_slots is not None:
        rows, why = min(asked, config.num_state_slots), f"num_state_slots is {config.num_state_slots}"
    else:
        left = _left_by_weights(runtime, model)
        left = min(left, CPU_BYTES * SHARE) if runtime.device == "cpu" else left
        rows = min(asked, max(1, least.most_rows(left)))
        size = (least.layout.bytes_per_slot + least.tail_bytes) >> 20
        why = f"each has states and latest tokens of {size} MiB; raise memory_ratio or tp, or set num_state_slots"
    rows = tp.minimum(rows) if tp is not None else rows
    if rows == asked:
        return runtime
    log.warning("%d sequences run at a time, not max_running_requests (%d): %s", rows, asked, why)
    return dataclasses.replace(runtime, config=dataclasses.replace(config, max_running_requests=rows))


def _left_by_weights(runtime: RuntimeConfig, model: ModelConfig) -> int:
    config, device, weights = runtime.config, device_of_rank(runtime.device, runtime.device_index(0)), 0
    if not config.dummy_weights:
        formats = model.quantization.with_option(config.quantization)
        tied, item_bytes = model.tie_word_embeddings, ITEM_BYTES[runtime.dtype]
        every = Path(runtime.model_dir), model.tensor_names, item_bytes
        weights = weight_bytes(*every, tied=tied, quantization=formats) // config.tp
    return int(free_bytes(device) * config.memory_ratio) - weights


def choose_states(runtime: RuntimeConfig, model: ModelConfig, left: int) -> StateRoom | None:
    """A slot for every running sequence, and as many for the prefix cache, fewer where memory is small.

    left: bytes that weights and the largest steps leave to states and pages. Raises ConfigError where they cannot hold
    the states of max_running_requests sequences, or num_state_slots where it is set.
    """
    least = least_states(runtime, model)
    if least is None:
        return None
    most, asked = runtime.config.max_running_requests, runtime.config.num_state_slots
    if asked is not None:
        if (given := least._replace(num_slots=asked)).num_bytes >= left:
            raise ConfigError(
                f"num_state_slots is {asked}; allowed: fewer, since these take {given.num_bytes >> 20} of the "
                f"{max(left, 0) >> 20} MiB that are left for them and for pages"
            )
        return given
    if runtime.device == "cpu":
        left = min(left, CPU_BYTES * SHARE)
    fitting = (left // SHARE - least.num_rows * least.tail_bytes) // least.layout.bytes_per_slot - 1
    needed = most + max(1, most // CACHED)
    if fitting < needed:
        raise ConfigError(
            f"max_running_requests is {most}; allowed for {model.architecture} in this memory: "
            f"{max(0, least.most_rows(left))} or fewer, since a sequence has a state of "
            f"{least.layout.bytes_per_slot >> 20} MiB; or raise memory_ratio or tp"
        )
    return least._replace(num_slots=min(2 * most, fitting))


def _most_drafts(runtime: RuntimeConfig) -> int:
    speculation = runtime.config.speculation
    return 0 if speculation is None else speculation.most_drafts
