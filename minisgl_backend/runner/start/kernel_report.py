"""`minisgl kernels`: the kernels of a model's weights on this machine's device, or on a GPU by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from minisgl_backend.attention.registry import import_failure
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.attention_choices import attention_choices
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.models.kernel_choices import Choice, Weight, kernel_choices, table
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.memory import weight_formats
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig


def kernel_report(config: EngineConfig, environment: Environment, device_facts: str | None = None) -> str:
    """Text of aligned columns. device_facts: a name for `DeviceFacts.named`, with every package installed; None: this
    machine.

    Raises ConfigError for what cannot be served, and for models that run on transformers' code.
    """
    model_dir = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
    model = load_model_config(model_dir, config.model_impl, trust_remote_code=config.trust_remote_code)
    if model.implementation != "native":
        raise ConfigError(f"model_impl is {model.implementation!r}; allowed for a report of kernels: a native family")
    why_missing: Callable[[str], str | None] = import_failure
    if device_facts is None:
        machine = MachineFacts.detect()
    else:
        machine, why_missing = MachineFacts.named(device_facts, config.dp * config.ranks_per_node), _nothing_is_missing
    runtime = resolve(config, model_dir, model, machine, environment, why_missing)
    weights = _choices(runtime, model, machine)
    attention = attention_choices(
        model, machine, getattr(torch, runtime.dtype), getattr(torch, runtime.kv_dtype), runtime.prefill_backend,
        runtime.decode_backend, tp_size=config.tp, decode_by_batch=runtime.decode_by_batch,
    )  # fmt: skip
    first, *others = weights.items()  # the first weight computes attention's inputs
    choices = dict([first, *attention.items(), *others])
    ranks = f" x {config.tp}" if config.tp > 1 else ""
    head = f"{model.architecture}, {runtime.dtype}, on {machine.name}{ranks}, by rows of a step"
    return f"{head}\n\n{table(choices)}"


def kernel_names(runtime: RuntimeConfig, model: ModelConfig) -> str:
    """Names of all kernels of the model's weights on this machine, as one line of text. model: a native one."""
    choices = _choices(runtime, model, MachineFacts.detect())
    return ", ".join(dict.fromkeys(choice.kernel for by_rows in choices.values() for choice in by_rows.values()))


def _choices(runtime: RuntimeConfig, model: ModelConfig, machine: MachineFacts) -> dict[Weight, dict[int, Choice]]:
    dtype: torch.dtype = getattr(torch, runtime.dtype)
    if machine.kind == "cpu":
        machine = dataclasses.replace(machine, own_kernels=dtype == torch.bfloat16 and machine.bfloat16())
    return kernel_choices(model, machine, dtype, tp_size=runtime.config.tp, quantization=weight_formats(runtime, model))


def _nothing_is_missing(package: str) -> str | None:
    return None
