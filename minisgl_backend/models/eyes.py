"""What a model folder says of the pixels that its encoder was trained with: preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.encoder_config import EncoderConfig, Normalisation
from minisgl_backend.models.json_files import read_json

_FILES = ("preprocessor_config.json", "processor_config.json")
_BYTE = 1 / 255  # the scale that makes 0 to 1 of a byte


def with_normalisation(encoder: EncoderConfig, folder: Path) -> tuple[EncoderConfig | None, str]:
    """The encoder with the folder's normalisation; or None, and why its images cannot be prepared."""
    path = next((folder / name for name in _FILES if (folder / name).exists()), None)
    if path is None:
        return None, f"{folder} has no {_FILES[0]}"
    try:
        keys = read_json(path)
        nested = keys.get("image_processor")
        return replace(encoder, normalisation=_read(nested if isinstance(nested, dict) else keys, encoder)), ""
    except ConfigError as error:
        return None, str(error)


def _read(keys: Mapping[str, Any], encoder: EncoderConfig) -> Normalisation:
    own = encoder.normalisation
    if keys.get("do_normalize") is False:
        own = Normalisation(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    else:
        mean, std = (_triple(keys, name, one) for name, one in (("image_mean", own.mean), ("image_std", own.std)))
        own = Normalisation(mean=mean, std=std)
    scale = keys.get("rescale_factor") or _BYTE
    if keys.get("do_rescale") is False or not isinstance(scale, float) or abs(scale - _BYTE) > 1e-6:
        raise ConfigError(f"rescale_factor is {keys.get('rescale_factor')!r}; allowed: 1/255, with do_rescale")
    return own


def _triple(keys: Mapping[str, Any], name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    found = keys.get(name) or default
    if not isinstance(found, (list, tuple)) or len(found) != 3 or not all(isinstance(x, (int, float)) for x in found):
        raise ConfigError(f"{name} is {found!r}; allowed: a number for each of three channels")
    first, second, third = map(float, found)
    return first, second, third
