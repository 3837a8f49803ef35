"""What a model folder says of its images: preprocessor_config.json and its neighbours, read as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True)
class ProcessorFiles:
    """Keys and values, null ones left out."""

    config: Mapping[str, Any]  # config.json
    image: Mapping[str, Any]  # preprocessor_config.json, or its part of processor_config.json
    processor: Mapping[str, Any] = field(default_factory=dict)  # processor_config.json
    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json

    @property
    def vision(self) -> Mapping[str, Any]:
        """The tower's part of config.json."""
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}

    def value(self, name: str, default: Any) -> Any:
        """Of the processor, which may also be said in config.json."""
        return self.processor.get(name, self.config.get(name, default))


def read_processor(model_dir: str | Path) -> ProcessorFiles:
    """Raises ConfigError for a file that is no JSON object."""
    folder = Path(model_dir)
    processor = _read(folder / "processor_config.json")
    nested = processor.get("image_processor")
    image = _read(folder / "preprocessor_config.json") or (dict(nested) if isinstance(nested, Mapping) else {})
    return ProcessorFiles(
        _read(folder / "config.json"), _without_nulls(image), processor, _read(folder / "tokenizer_config.json")
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is a {type(found).__name__}; allowed: an object")
    return _without_nulls(found)


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
