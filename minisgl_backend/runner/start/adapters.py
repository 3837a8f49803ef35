"""The adapters of a start: read, checked and put into slots beside the model's layers, on each rank alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.tensor_parallel import TensorParallel

log = logging.getLogger(__name__)


def load_adapters(
    runtime: RuntimeConfig, config: ModelConfig, model: torch.nn.Module, device: torch.device, tp: TensorParallel
) -> AdapterSlots | None:
    """None: the options name none. Raises ConfigError naming the folder and what is wrong with it."""
    folders, num_slots = runtime.config.adapter_folders, runtime.config.num_adapter_slots
    if not num_slots:
        return None
    read = {folder: AdapterTensors.read(Path(folder)) for folder in {*folders.values()}}
    _check_alike(read, tp)
    adapters = {name: read[folder] for name, folder in folders.items()}
    dtype, rank = getattr(torch, runtime.dtype), runtime.config.adapter_rank
    slots = AdapterSlots(model, config.tensor_names, adapters, num_slots, dtype=dtype, device=device, rank=rank)
    size = slots.bytes_per_slot / 2**20
    log.info("%d adapters, %d slots of %.1f MiB: %s", len(adapters), num_slots, size, ", ".join(adapters))
    return slots


def _check_alike(read: Mapping[str, AdapterTensors], tp: TensorParallel) -> None:
    """Ranks on several machines have folders of their own."""
    for folder in sorted(read):
        digest = int.from_bytes(read[folder].digest[:7], "big")
        if (tp.minimum(digest), -tp.minimum(-digest)) != (digest, digest):
            raise ConfigError(f"{folder} differs between the ranks' machines; allowed: the same adapter on each")
