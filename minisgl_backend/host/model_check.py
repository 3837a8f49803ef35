"""Checks a model and its options as far as files allow, quickly, before a server starts.

Needs no torch, whose import takes seconds. What depends on the machine's device is checked in a separate process
meanwhile (`options.check`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.engine import read_engine_config, read_parameters
from minisgl_backend.models.folder import DEMOS, is_local
from minisgl_backend.process.memory import free_host_bytes

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


def check_repository(repository: Path, free: Callable[[], int] = free_host_bytes) -> None:
    """Raises ConfigError for what cannot be served. Skips a model that still has to be fetched.

    `free`: returns the free bytes of the host's memory.
    """
    try:
        text = (repository / "engine" / "config.pbtxt").read_text(encoding="utf-8")
    except OSError:
        return  # not our repository, or one that the server itself will report on
    model = EngineConfig.from_parameters(read_parameters(text)).model
    if model in DEMOS or is_local(model):
        check_folder(read_engine_config(repository), free)


def check_folder(config: EngineConfig, free: Callable[[], int] = free_host_bytes) -> None:
    """The same for a model whose folder exists; `config.model` names it."""
    # Imported late: wrong options are refused, and hub ids fetched, before a model is read.
    from minisgl_backend.adapters.config import LoraConfig
    from minisgl_backend.models.choose import load_model_config
    from minisgl_backend.weights.schemes.gguf import with_blocks
    from minisgl_backend.weights.sizes import ITEM_BYTES, check_memory, weight_bytes

    folder = Path(config.model)
    model = load_model_config(folder, config.model_impl, trust_remote_code=config.trust_remote_code)
    model.max_seq_len(config.max_seq_len_override)
    check_tokenizer(folder, trust_remote_code=config.trust_remote_code)
    for adapter in config.adapter_folders.values():
        LoraConfig.read(Path(adapter))
    if config.adapter_dir is not None and not Path(config.adapter_dir).is_dir():
        raise ConfigError(
            f"adapter_dir is {config.adapter_dir!r}, which is no folder; allowed: one with adapters' folders"
        )
    if config.merge_adapter is not None:
        LoraConfig.read(Path(config.merge_adapter), merged=True)
    if config.runner == "null":
        return
    model.check_tensor_parallel(config.tp)
    if config.dummy_weights:
        return
    item_bytes = ITEM_BYTES[_least_dtype(config.dtype, model.dtype)]
    formats = model.quantization.with_option(config.quantization)
    if item_bytes == ITEM_BYTES["bfloat16"]:
        formats = with_blocks(formats, folder)  # the least, if this machine's kernels can be compiled
    weights = weight_bytes(folder, model.tensor_names, item_bytes, tied=model.tie_word_embeddings, quantization=formats)
    if model.encoder is not None and config.encoder_cache_bytes > 0:
        weights += _encoder_bytes(folder, item_bytes)
    if not has_gpu():
        check_memory(config.model, weights * config.dp // config.nodes, free())


def _encoder_bytes(folder: Path, item_bytes: int) -> int:
    """Raises ConfigError for a folder that has none of its encoder's weights, as that of a model tuned on texts."""
    from minisgl_backend.encoders.names import NAMES
    from minisgl_backend.weights.sizes import weight_bytes

    if not (found := weight_bytes(folder, NAMES, item_bytes)):
        raise ConfigError(
            f"{folder} has no weights of the image encoder that its config.json describes; with encoder_cache_mib 0 "
            "its text is served"
        )
    return found


def check_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raises ConfigError if the folder has no tokenizer that can be loaded."""
    if not any((folder / name).is_file() for name in _TOKENIZERS) and not (
        any(folder.glob("*.tiktoken")) or (trust_remote_code and any(folder.glob("*.py")))
    ):
        raise ConfigError(
            f"model is {str(folder)!r}, which has no tokenizer; allowed: a folder with one of {', '.join(_TOKENIZERS)}"
        )
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None


def may_lack_gpu(repository: Path) -> bool:
    """Whether attention kernels are selected by name on a machine without a GPU, where most are not served."""
    try:
        text = (repository / "engine" / "config.pbtxt").read_text(encoding="utf-8")
    except OSError:
        return False
    asked = EngineConfig.from_parameters(read_parameters(text)).attention_backend
    return asked not in ("auto", "torch") and not has_gpu()


def has_gpu() -> bool:
    """Whether models may run on a GPU. If its driver does not work they run on the CPU after all."""
    return any(Path(device).exists() for device in _GPU_DEVICES)


def _least_dtype(dtype: str, saved: str) -> str:
    """The smallest dtype that weights on a CPU may get; only the engine knows what auto makes of bfloat16."""
    if dtype == "auto":
        return "bfloat16" if saved == "bfloat16" else "float32"
    return dtype
