"""Reads the engine's options, which all three models share, from model_repository/engine/config.pbtxt."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from minisgl_backend.config import EngineConfig, read_adapters
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.folder import DEMOS, find_model_dir
from minisgl_backend.weights.gguf_index import name_of

MULTI_LORA = "vllm_model/1/multi_lora.json"
# Here and in `host.repository` by regexes, not by protobuf's text format: that needs the message's description, which
# comes with tritonclient, while Triton's Python and `minisgl init` do without. It would also drop comments.
_ENTRY = re.compile(r'key\s*:?\s*"([^"]*)"\s*[,;]?\s*value\s*:?\s*\{\s*string_value\s*:?\s*("(?:[^"\\]|\\.)*")\s*\}')


def read_engine_config(repository: Path, given: Mapping[str, str] = MappingProxyType({})) -> EngineConfig:
    """The engine options of a model repository, with the model's folder as an absolute path. Raises ConfigError.

    `given`: parameters that override the repository's own.
    """
    path = repository / "engine" / "config.pbtxt"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    config = EngineConfig.from_parameters({**read_parameters(text), **given})
    if (adapters := _vllm_adapters(repository)) is not None:
        if config.adapters:
            raise ConfigError(f"adapters is {config.adapters!r}; allowed beside {MULTI_LORA}: unset")
        config = dataclasses.replace(config, adapters=adapters)
    if config.model in DEMOS:
        folder = _demo_dir(config.model, repository)
    else:
        folder = find_model_dir(config.model, trust_remote_code=config.trust_remote_code)
    return dataclasses.replace(config, model=str(folder))


def _vllm_adapters(repository: Path) -> str | None:
    """What vllm_backend's file of adapters says, as `adapters`; None: there is none. Raises ConfigError."""
    path = repository / MULTI_LORA
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    entries = found.items() if isinstance(found, dict) else ()
    if not found or not all(isinstance(one, str) for entry in entries for one in entry) or not entries:
        raise ConfigError(f"{path} is {str(found)[:100]!r}; allowed: an object of folders by adapters' names")
    adapters = ",".join(f"{name}={path.parent / folder}" for name, folder in entries)
    if read_adapters(adapters) != {name: str(path.parent / folder) for name, folder in entries}:
        raise ConfigError(f"{path}: a name or folder has a comma or =, or is empty or too long; allowed: others")
    return adapters


def read_parameters(config: str) -> Mapping[str, str]:
    """The string parameters in the text of a config.pbtxt, except those in comments."""
    lines = (line for line in config.splitlines() if not line.lstrip().startswith("#"))
    return {key: json.loads(value) for key, value in _ENTRY.findall("\n".join(lines))}


def demo_name(config: EngineConfig, repository: Path) -> str | None:
    """Of a model that comes with the project."""
    return next((name for name in DEMOS if Path(config.model) == _demo_dir(name, repository)), None)


def model_name(config: EngineConfig, repository: Path) -> str:
    """What the model is called where no name was chosen."""
    return demo_name(config, repository) or name_of(Path(config.model))


def _demo_dir(name: str, repository: Path) -> Path:
    """The model of this repository, or otherwise the one that comes with the package."""
    own = (repository / "engine" / DEMOS[name]).resolve()
    return own if own.is_dir() else find_model_dir(name)
