"""The adapters of a start: read, checked and put into slots beside the model's layers, on each rank alike."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from minisgl_backend.adapters.served import ServedAdapter
from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start.runtime_config import RuntimeConfig

log = logging.getLogger(__name__)


def load_adapters(
    runtime: RuntimeConfig, config: ModelConfig, model: torch.nn.Module, device: torch.device
) -> tuple[ServedAdapter, ...]:
    """One slot each, in the order of the option. Raises ConfigError naming the folder and what is wrong with it."""
    folders = runtime.config.adapter_folders
    if not folders:
        return ()
    read = {name: AdapterTensors.read(Path(folder)) for name, folder in folders.items()}
    dtype, adapters = getattr(torch, runtime.dtype), [*read.values()]
    slots = AdapterSlots(model, config.tensor_names, adapters, len(read), dtype=dtype, device=device)
    for number in range(len(adapters)):
        slots.load(number + 1, number)
    log.info("%d adapters in slots of %d MiB: %s", len(read), slots.bytes_per_slot >> 20, ", ".join(read))
    return tuple(ServedAdapter(name, slot, one.digest) for slot, (name, one) in enumerate(read.items(), 1))
