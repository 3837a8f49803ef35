"""The adapters of a start: read, checked and put into slots beside the model's layers, on each rank alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from minisgl_backend.adapters.merge import MergedCheckpoint
from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import adapter_path
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.files import Readable
from minisgl_backend.weights.names import TensorNames

log = logging.getLogger(__name__)


def load_adapters(
    runtime: RuntimeConfig, config: ModelConfig, model: torch.nn.Module, device: torch.device, tp: TensorParallel
) -> AdapterSlots | None:
    """None: the options name none. Raises ConfigError naming the folder and what is wrong with it."""
    folders, num_slots = runtime.config.adapter_folders, runtime.config.num_adapter_slots
    if not num_slots:
        return None
    read = {folder: AdapterTensors.read(Path(adapter_path(folder))) for folder in {*folders.values()}}
    _check_alike(read, tp)
    adapters = {name: read[folder] for name, folder in folders.items()}
    dtype, rank = getattr(torch, runtime.dtype), runtime.config.adapter_rank
    slots = AdapterSlots(model, config.tensor_names, adapters, num_slots, dtype=dtype, device=device, rank=rank)
    size = slots.bytes_per_slot / 2**20
    log.info("%d adapters, %d slots of %.1f MiB: %s", len(adapters), num_slots, size, ", ".join(adapters))
    return slots


def read_merged(
    runtime: RuntimeConfig, tp: TensorParallel
) -> Callable[[Readable, TensorNames, bool], MergedCheckpoint] | None:
    """See `LoadConfig.merge`; None: the options name no adapter to be merged. Raises ConfigError."""
    folder = runtime.config.merge_adapter
    if folder is None:
        return None
    adapter = AdapterTensors.read(Path(adapter_path(folder)), merged=True)
    _check_alike({folder: adapter}, tp)
    return partial(MergedCheckpoint, adapter)


def _check_alike(read: Mapping[str, AdapterTensors], tp: TensorParallel) -> None:
    """Ranks on several machines have folders of their own."""
    for folder in sorted(read):
        digest = int.from_bytes(read[folder].digest[:7], "big")
        if (tp.minimum(digest), -tp.minimum(-digest)) != (digest, digest):
            raise ConfigError(f"{folder} differs between the ranks' machines; allowed: the same adapter on each")
