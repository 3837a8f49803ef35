"""The JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError where there is no file, or no JSON object in it."""
    content = _read(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}; a JSON object is needed")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Raises ConfigError where there is no file, or no JSON list in it."""
    content = _read(path)
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds a {type(content).__name__}; a JSON list is needed")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """{} where there is no file."""
    return read_json(path) if path.is_file() else {}


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a model is a folder in Hugging Face format with a config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
