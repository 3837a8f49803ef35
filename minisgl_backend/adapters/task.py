"""An adapter as a client of TensorRT-LLM sends it: `lora_weights` and `lora_config`, kept in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load

from minisgl_backend.adapters.config import LoraConfig
from minisgl_backend.adapters.roots import TASK_FILE
from minisgl_backend.adapters.task_modules import TASK_MODULES
from minisgl_backend.adapters.tensors import DIGEST_BYTES, AdapterTensors, Factors
from minisgl_backend.errors import ConfigError


def read_task(folder: Path, size_of: Callable[[str], tuple[int, int]]) -> AdapterTensors:
    """size_of: inputs and outputs of a module of the model. Raises ConfigError, with the client's names alone."""
    try:
        content = (folder / TASK_FILE).read_bytes()
        found = load(content)
    except SafetensorError as error:
        raise ConfigError(f"lora_weights cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"lora_weights cannot be read: {error.strerror}") from None
    weights, rows = found["lora_weights"], found["lora_config"].tolist()
    by_module: dict[str, Factors] = {}
    for row, (number, layer, rank) in zip(weights, rows, strict=True):
        names = [f"model.layers.{layer}.{leaf}" for leaf in TASK_MODULES[number]]
        sizes = [size_of(name) for name in names]
        size_in, size_out = sizes[0][0], sum(out for _, out in sizes)
        if len(row) < (numbers := rank * (size_in + size_out)):
            raise ConfigError(
                f"lora_weights has {len(row)} numbers for module {number} of layer {layer}; allowed for rank {rank}: "
                f"{numbers} or more"
            )
        a = row[: rank * size_in].view(rank, size_in)
        b = row[rank * size_in : numbers].view(size_out, rank)
        for name, part in zip(names, b.split([out for _, out in sizes]), strict=True):
            if name in by_module:
                raise ConfigError(f"lora_config has module {number} of layer {layer} twice; allowed: once")
            by_module[name] = Factors(a, part, 1.0)  # B has the scale
    config = LoraConfig(
        path=folder / TASK_FILE, rank=1, alpha=1.0, rank_pattern={}, alpha_pattern={}, divides_by_root=False
    )
    digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=b"minisgl task").digest()
    return AdapterTensors("lora_weights", config, by_module, digest, base={})
