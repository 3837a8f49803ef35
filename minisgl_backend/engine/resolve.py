"""From the user's options to settings in which nothing is "auto": options + model + device -> RuntimeConfig.

Knows nothing of weights, memory or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from minisgl_backend.attention.registry import choose_attention
from minisgl_backend.config import EngineConfig, Environment, RuntimeConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.device import DeviceFacts

log = logging.getLogger(__name__)


def resolve(
    config: EngineConfig,
    environment: Environment,
    model_dir: Path,
    model: ModelConfig,
    device: DeviceFacts,
    on_warning: Callable[[str], None] = log.warning,
) -> RuntimeConfig:
    """Raises ConfigError where an option does not fit the model or the device."""
    capability = None if device.capability is None else 10 * device.capability[0] + device.capability[1]
    attention = choose_attention(config.attention_backend, config.page_size, compute_capability=capability)
    for warning in attention.warnings:
        on_warning(warning)
    model.check_tensor_parallel(config.tp)
    if device.kind == "cuda" and config.tp > device.count:
        raise ConfigError(f"tp is {config.tp}; allowed: 1 to {device.count}, the GPUs that this process sees")
    return RuntimeConfig(
        config=config,
        model_dir=str(model_dir),
        device=device.kind,
        dtype=_dtype(config.dtype, model.dtype, device),
        prefill_backend=attention.prefill,
        decode_backend=attention.decode,
        page_size=attention.page_size,
        max_seq_len=_max_seq_len(config.max_seq_len_override, model.max_position),
        overlap=environment.overlap,
        cuda_graph_max_bs=0 if device.kind == "cpu" else config.cuda_graph_max_bs,
        flashinfer_tensor_cores=environment.flashinfer_tensor_cores,
    )


def _dtype(wanted: str, of_model: str, device: DeviceFacts) -> str:
    if wanted == "bfloat16" and device.kind == "cuda" and not device.bfloat16:
        raise ConfigError(f"dtype is bfloat16, which {device.name} does not compute in; allowed: float16, float32")
    if wanted != "auto":
        return wanted
    if device.kind == "cpu":
        return "float32"
    return "bfloat16" if of_model == "bfloat16" and device.bfloat16 else "float16"


def _max_seq_len(wanted: int | None, of_model: int) -> int:
    if wanted is None:
        return of_model
    if wanted > of_model:
        raise ConfigError(f"max_seq_len_override is {wanted}; allowed: 2 to {of_model}, the model's own limit")
    return wanted
