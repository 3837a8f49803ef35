"""From the user's settings, a model and a machine to settings in which nothing is "auto"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from minisgl_backend.attention.registry import choose_attention, import_failure
from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.pool import max_pages
from minisgl_backend.models.build import attention_needs
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.number_formats import FP8_E4M3, KV_CACHE_DTYPES, WEIGHT_FORMATS
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.draft import resolve_draft
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import PAGE_SIZE as STATE_PAGE_SIZE
from minisgl_backend.runner.start.step_sizes import PREFILL_LENGTH
from minisgl_backend.speculative_config import most_decode_entries

log = logging.getLogger(__name__)

# In a longer step each expert of a mixture gets more tokens, so that less of its last tile is empty; but requests that
# arrive meanwhile wait for its end.
MIXTURE_PREFILL_LENGTH, LONGEST_PREFILL_S = 16384, 0.25
# Steps with prompt tokens are captured where launching them takes the host longer than computing takes the device:
# LAUNCH_S per layer, on the slower of the measured hosts, against MULTIPROCESSOR_FLOPS per second and multiprocessor.
# The latter is an upper estimate, which captures rather too many sizes than too few: steps of Qwen3-0.6B reach four
# fifths of it on an H200, and smaller GPUs less. For most models the limit is below 2,048 tokens; for Qwen3-0.6B on an
# H200 it is 8,192.
LAUNCH_S, MULTIPROCESSOR_FLOPS = 0.7e-3, 3e12
LEAST_GRAPH_TOKENS, MOST_GRAPH_TOKENS = 2048, 8192  # bounds of the default
GRAPH_TOKENS_STEP = 1024
LEAST_TRITON = (3, 5)  # 3.4 compiles neither gdc_wait nor a load whose mask has more rows than its pointers
# Decode steps of a CPU up to this size are recorded: with more rows GEMMs take much longer than Python does.
RECORDED_MAX_BS = 8
EAGER_GRAPH_MAX_BS = 32  # on the CPU, where graphs take no memory by which to choose it


def resolve(
    config: EngineConfig,
    model_dir: str | Path,
    model: ModelConfig,
    device: MachineFacts,
    environment: Environment,
    why_missing: Callable[[str], str | None] = import_failure,
    dp_rank: int = 0,
) -> RuntimeConfig:
    """Raises ConfigError naming the option, its value and what is allowed for this model on this machine.

    `dp_rank`: which of config.dp engine cores this is. `why_missing(package)`: why a package of an attention backend
    cannot be imported; None: it can.
    """
    _check_num_devices(config, model, device)
    _check_triton(device)
    _check_quantization(config.quantization, model, device)
    names = ("adapters", "adapter_dir", "max_lora_rank", "max_adapter_tasks", "merge_adapter")
    if model.implementation != "native" and (name := next((name for name in names if getattr(config, name)), None)):
        raise ConfigError(
            f"{name} is {getattr(config, name)!r}; allowed for {model.architecture}, which runs on transformers' code: "
            "none"
        )
    if config.merge_adapter is not None and config.dummy_weights:
        raise ConfigError(f"merge_adapter is {config.merge_adapter!r}; allowed with dummy_weights: none")
    dtype, on_gpu = _dtype(config, model, device), device.kind == "cuda"
    kv_dtype = KV_CACHE_DTYPES.get(config.kv_cache_dtype, dtype)
    needs = attention_needs(
        model, tp_size=config.tp, compute_capability=device.compute_capability, dtype=dtype, kv_dtype=kv_dtype
    )
    page_size = STATE_PAGE_SIZE if config.page_size is None and model.has_states and on_gpu else config.page_size
    attention = choose_attention(config.attention_backend, page_size, needs, why_missing)
    _check_num_pages(config.num_pages, attention.page_size)
    for warning in attention.warnings:
        log.warning("%s", warning)
    if model.unknown_keys:
        log.warning(
            "config.json: %s: read neither by this engine nor by transformers for this model, and ignored",
            ", ".join(model.unknown_keys),
        )
    _check_cache_scales(config, kv_dtype, model)
    max_prefill_length = _max_prefill_length(config, model, device.multiprocessors)
    if model.ends_with_pages and max_prefill_length < attention.page_size:
        raise ConfigError(
            f"max_prefill_length is {max_prefill_length}; allowed for {model.architecture}, whose prompts are computed "
            f"in whole pages: {attention.page_size} or more, the page size"
        )
    max_seq_len = model.max_seq_len(config.max_seq_len_override)
    if max_seq_len < model.max_position and not config.max_seq_len_override:
        log.info(
            "sequences have up to %d tokens; max_seq_len_override allows up to %d, with dynamic rope scaling for all",
            max_seq_len,
            model.max_position,
        )
    draft = resolve_draft(
        config,
        Path(model_dir),
        model,
        needs,
        page_size=attention.page_size,
        max_seq_len=max_seq_len,
        why_missing=why_missing,
    )
    return RuntimeConfig(
        config=config,
        model_dir=str(model_dir),
        device=device.kind,
        first_device=config.first_device(dp_rank),
        dtype=dtype,
        kv_dtype=kv_dtype,
        prefill_backend=attention.prefill,
        decode_backend=attention.decode,
        decode_by_batch=attention.decode_by_batch,
        page_size=attention.page_size,
        max_seq_len=max_seq_len,
        cuda_graph_max_bs=_graph_max_bs(config, device, environment.eager_graphs),
        max_prefill_length=max_prefill_length,
        cuda_graph_max_tokens=_graph_max_tokens(config, model, device, environment.eager_graphs, max_prefill_length),
        eager_graphs=environment.eager_graphs,
        flashinfer_tensor_cores=environment.flashinfer_tensor_cores,
        draft=draft,
    )


def _check_quantization(option: str | None, model: ModelConfig, device: MachineFacts) -> None:
    if option is not None and model.implementation != "native":
        raise ConfigError(
            f"quantization is {option!r}; allowed for {model.architecture}, which runs on transformers' code: unset"
        )
    for scheme in model.quantization.with_option(option).schemes:
        needed, found = WEIGHT_FORMATS[scheme.format].capability, device.capability
        if found is None or found >= needed:
            continue
        needs = f"needs a GPU of compute capability {needed[0]}.{needed[1]}"
        name = f"{device.name} ({found[0]}.{found[1]})"
        if option is not None:
            raise ConfigError(f"quantization is {option!r}, which {needs}; allowed on {name}: unset")
        raise ConfigError(
            f"the checkpoint's number format ({scheme}) {needs}; allowed on {name}: one of another format"
        )


def _check_cache_scales(config: EngineConfig, kv_dtype: str, model: ModelConfig) -> None:
    """A cache in 16 bits needs no scales, whatever the checkpoint has."""
    refusal = model.quantization.cache_refusal
    if refusal is None or config.dummy_weights:
        return
    if kv_dtype == FP8_E4M3:
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}, and {refusal}")
    log.warning("the checkpoint's scales of a quantized KV cache are left out, since the cache is %s", kv_dtype)


def _check_num_pages(num_pages: int | None, page_size: int) -> None:
    most = max_pages(page_size)
    if num_pages is not None and num_pages > most:
        raise ConfigError(
            f"num_pages is {num_pages}; allowed with pages of {page_size} tokens: 1 to {most}, since the slots of "
            "tokens have 32-bit indices"
        )


def _dtype(config: EngineConfig, model: ModelConfig, device: MachineFacts) -> str:
    requested = config.dtype
    if requested == "auto":
        # On a CPU this project's kernels compute in 16 bits what native models have most; torch does well in bfloat16
        # alone, and there only where the processor multiplies it.
        is_ours = device.kind == "cuda" or (model.implementation == "native" and model.latents is None)
        by_torch = model.dtype == "bfloat16" and device.bfloat16_units
        if model.dtype != "float32" and (is_ours or by_torch) and device.bfloat16():
            return "float16" if model.dtype == "float16" else "bfloat16"
        return "float32" if device.kind == "cpu" else "float16"
    if requested == "bfloat16" and device.kind == "cuda" and not device.bfloat16():
        raise ConfigError(f"dtype is 'bfloat16', which {device.name} does not have; allowed: auto, float16, float32")
    return requested


def _graph_max_bs(config: EngineConfig, device: MachineFacts, eager: bool) -> int | None:
    requested = config.cuda_graph_max_bs
    if device.kind == "cpu":
        most = EAGER_GRAPH_MAX_BS if eager else RECORDED_MAX_BS
        requested = most if requested is None else requested if eager else min(requested, most)
    return (
        None
        if requested is None
        else min(requested, most_decode_entries(config.max_running_requests, config.speculation))
    )


def _max_prefill_length(config: EngineConfig, model: ModelConfig, multiprocessors: int) -> int:
    """multiprocessors: of each rank's GPU; 0: no GPU."""
    if config.max_prefill_length is not None:
        return config.max_prefill_length
    flops = 2 * MIXTURE_PREFILL_LENGTH * model.layer_weights_per_token / config.tp
    if model.mixture is not None and flops <= LONGEST_PREFILL_S * multiprocessors * MULTIPROCESSOR_FLOPS:
        return MIXTURE_PREFILL_LENGTH
    return PREFILL_LENGTH


def _graph_max_tokens(
    config: EngineConfig, model: ModelConfig, device: MachineFacts, eager: bool, max_prefill_length: int
) -> int:
    if device.kind == "cpu" and not eager:
        return 0
    requested = config.cuda_graph_max_tokens
    if requested is None and config.cuda_graph_max_bs == 0:
        requested = 0
    if requested is None:
        requested = LEAST_GRAPH_TOKENS if eager else _graph_tokens(model, config.tp, device.multiprocessors)
    most_entries = most_decode_entries(config.max_running_requests, config.speculation)
    return min(requested, max_prefill_length + most_entries)  # the most that a step can have


def _graph_tokens(model: ModelConfig, tp: int, multiprocessors: int) -> int:
    """Largest number of tokens for which a step of this model may be launch-bound, a multiple of GRAPH_TOKENS_STEP.

    multiprocessors: of each rank's GPU.
    """
    launching_s = LAUNCH_S * model.num_layers
    tokens = int(launching_s * multiprocessors * MULTIPROCESSOR_FLOPS / (2 * model.layer_weights_per_token / tp))
    whole = tokens // GRAPH_TOKENS_STEP * GRAPH_TOKENS_STEP
    return min(MOST_GRAPH_TOKENS, max(LEAST_GRAPH_TOKENS, whole))


def _check_triton(device: MachineFacts) -> None:
    if device.triton is None or tuple(int(part) for part in device.triton.split(".")[:2]) >= LEAST_TRITON:
        return
    least = ".".join(map(str, LEAST_TRITON))
    raise ConfigError(
        f"triton is {device.triton}; needed on a GPU: {least} or newer, which comes with torch 2.9: "
        "pip install 'torch>=2.9'"
    )


def _check_num_devices(config: EngineConfig, model: ModelConfig, device: MachineFacts) -> None:
    model.check_tensor_parallel(config.tp)
    if device.kind == "cuda" and config.ranks_per_node > device.count:
        on_nodes = f", on {config.nodes} nodes" if config.nodes > 1 else ""
        raise ConfigError(
            f"tp is {config.tp}; allowed: 1 to {device.count * config.nodes}, the number of GPUs that this process "
            f"sees{on_nodes}"
        )
    if device.kind == "cuda" and config.dp * config.ranks_per_node > device.count:
        raise ConfigError(
            f"dp is {config.dp}; allowed with tp {config.tp}: 1 to {device.count // config.tp}, as each engine core "
            f"has tp GPUs of its own and this process sees {device.count}"
        )
