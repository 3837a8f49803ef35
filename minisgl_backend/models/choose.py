"""Which code runs a model folder: a native family of this project, or transformers' own classes (`model_impl`)."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import PUBLISHED_ALSO, ModelConfig
from minisgl_backend.models.json_files import read_json
from minisgl_backend.models.known_keys import ReadElsewhereError
from minisgl_backend.models.quantization_files import find_quantization

log = logging.getLogger(__name__)

# In another module, so that a native model needs neither torch nor transformers.
_FALLBACK = "minisgl_backend.models.fallback.describe"


def load_model_config(
    model_dir: str | Path, model_impl: str = "auto", *, trust_remote_code: bool = False
) -> ModelConfig:
    """The config of a model folder for the implementation that `model_impl` selects; auto prefers the native family.

    Raises ConfigError naming what is not served, by which of the two and why.
    """
    folder = Path(model_dir)
    if model_impl == "transformers":
        return _through_transformers(folder, trust_remote_code)
    try:
        return ModelConfig.load(folder)
    except ReadElsewhereError:  # transformers' code ignores that key in silence
        raise
    except ConfigError as error:
        if model_impl == "native" or not _may_fall_back(folder):
            raise
        native = error
    quantization = find_quantization(read_json(folder / "config.json"), folder)
    if quantization is not None and quantization.path in str(native):
        raise native
    try:
        if quantization is not None:
            quantization.check_plain()
        config = _through_transformers(folder, trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"{native}. Nor does it run through transformers' code: {error}") from None
    log.warning(
        "%s runs through transformers' own code (model_impl), slower than a native family, since none serves it: %s",
        config.architecture,
        native,
    )
    return config


def _through_transformers(folder: Path, trust_remote_code: bool) -> ModelConfig:
    try:
        describe = importlib.import_module(_FALLBACK).describe
    except ImportError as error:  # an old transformers, or none
        raise ConfigError(f"model_impl is 'transformers', which cannot be imported here: {error}") from error
    config: ModelConfig = describe(folder, trust_remote_code=trust_remote_code)
    return config


def _may_fall_back(folder: Path) -> bool:
    """Whether to try transformers, which takes seconds: folders that it cannot serve either are refused before."""
    config = read_json(folder / "config.json")
    return (
        isinstance(config.get("model_type"), str)
        and not config.get("is_encoder_decoder")
        and not (folder / "adapter_config.json").exists()
        and str(next(iter(config.get("architectures") or ()), "")) not in PUBLISHED_ALSO
    )
