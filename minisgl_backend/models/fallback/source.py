"""Which class of transformers runs a model folder, and with which config."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import check_decoder
from minisgl_backend.models.quantization_files import find_quantization

log = logging.getLogger(__name__)

LEAST_TRANSFORMERS = (5, 17)
# Layer types with a state other than keys and values.
_RECURRENT = ("linear_attention", "conv", "recurrent", "mamba", "mamba2", "hybrid")


class UnservedError(Exception):
    """A feature of a model that the engine does not support; a clause that follows "it"."""


@dataclass(frozen=True)
class Source:
    """A class and the config of the text model that it is built from."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    is_part: bool  # of a model with encoders for images, sound or video, which are left out

    @property
    def name(self) -> str:
        return self.model_class.__name__


def find_source(folder: Path, config_json: Mapping[str, Any], *, trust_remote_code: bool) -> Source:
    """Raises ConfigError naming what transformers or this engine lacks."""
    check_decoder(config_json)
    _check_version()
    quantization = find_quantization(config_json, folder)
    if quantization is not None:
        quantization.check_plain()
    config = _read(folder, config_json, trust_remote_code)
    _check_config(config)
    text = config.get_text_config(decoder=True)
    architecture = str(next(iter(config_json.get("architectures") or []), ""))
    if "auto_map" in config_json and "AutoModelForCausalLM" in config_json["auto_map"] and trust_remote_code:
        reference = config_json["auto_map"]["AutoModelForCausalLM"]
        return Source(get_class_from_dynamic_module(reference, str(folder)), config, is_part=False)
    served = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_part = text is not config
    own = served.get(text.model_type) if is_part else served.get(config.model_type)
    if not is_part and architecture in served.values():
        own = architecture
    # Letters differ between a model's own code and transformers: PhiMoEForCausalLM, PhimoeForCausalLM.
    if own is None or (not is_part and architecture.lower() not in ("", own.lower())):
        where = f"its text model {text.model_type}" if is_part else architecture or config.model_type
        raise ConfigError(
            f"config.json: architectures is [{json.dumps(architecture)}], and transformers "
            f"{transformers.__version__} has no causal language model for {where}; allowed: a decoder that it has"
        )
    model_class = getattr(transformers, own)
    if is_part:
        log.warning("%s: only the text model is served, as %s; its encoders are left out", architecture, own)
    return Source(model_class, text, is_part)


def _check_version() -> None:
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < LEAST_TRANSFORMERS:
        least = ".".join(map(str, LEAST_TRANSFORMERS))
        raise ConfigError(
            f"transformers is {transformers.__version__}; needed for models without a native family: {least} or newer: "
            f"pip install 'transformers>={least}'"
        )


def _read(folder: Path, config_json: Mapping[str, Any], trust_remote_code: bool) -> PreTrainedConfig:
    model_type, remote = config_json.get("model_type"), "auto_map" in config_json
    if model_type not in transformers.CONFIG_MAPPING and not (remote and trust_remote_code):
        hint = (
            "the folder brings Python code for it, which runs with trust_remote_code"
            if remote
            else "a newer transformers may"
        )
        raise ConfigError(
            f"config.json: model_type is {json.dumps(model_type)}, which transformers {transformers.__version__} does "
            f"not have; {hint}"
        )
    with reasons("reads no config from config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    return config


def _check_config(config: PreTrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise ConfigError(
            f"config.json: the config of the text model is a {type(text).__name__} for model_type "
            f"{json.dumps(config.model_type)}, not a config of transformers' own"
        )
    if config.is_encoder_decoder or text.is_encoder_decoder:
        check_decoder({"is_encoder_decoder": True})
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type in _RECURRENT:
            raise ConfigError(
                f"config.json: layer_types has {json.dumps(layer_type)}; allowed: attention layers: those with a state "
                "other than keys and values are not served"
            )


@contextlib.contextmanager
def reasons(what: str) -> Iterator[None]:
    """Converts all exceptions of transformers inside to a ConfigError: `what` follows the word transformers."""
    try:
        yield
    except (ConfigError, UnservedError):
        raise
    except Exception as error:  # config classes and modeling files raise errors of all kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ConfigError(f"transformers {what}: {' '.join(lines)[:300]}") from error
