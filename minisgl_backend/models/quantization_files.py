"""Where a model folder says that its weights are quantized: for the native families and for the fallback alike. Needs
no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.json_files import read_json_if_there
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.quantization_config import read_quantization_config
from minisgl_backend.weights.schemes.keys import refusal

# In config.json, and the older name of compressed-tensors.
CONFIG_KEYS = ("quantization_config", "compression_config")
_OTHER_ENGINES = "quantization"  # MLX's, TensorRT-LLM's
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_MODELOPT = "hf_quant_config.json"
# Other files of tools, the older of which wrote nothing into config.json: a key that tells them, and the method where
# they do not name it: AutoGPTQ's and GPTQModel's, AutoAWQ's, AutoRound's.
_FILES = (
    ("quantize_config.json", ("bits",), "gptq"),
    ("quant_config.json", ("w_bit", "bits"), "awq"),
    ("quantization_config.json", ("quant_method",), None),
)


@dataclass(frozen=True)
class Quantization:
    """What is said, and where."""

    path: str  # of the object in its file: `config.json: quantization_config`
    said: Any

    def read(self, names: TensorNames) -> QuantizationConfig:
        """names: of the model's tensors. Raises ConfigError for what is not served."""
        return read_quantization_config(self.said, names, self.path)

    def check_plain(self) -> None:
        """Raises ConfigError unless weights are plain numbers, of which only the cache's scales were calibrated."""
        try:
            is_plain = not self.read(TensorNames()).schemes
        except ConfigError:
            is_plain = False
        if not is_plain:
            raise refusal(self.path, self.said, "absent, for models that run through transformers' code")


def find_quantization(config: Mapping[str, Any], folder: Path | None = None) -> Quantization | None:
    """config: the contents of config.json. folder: where other files of the model are. None: weights are plain.

    config.json counts first, the outer one before the text model's. Raises ConfigError for a file that cannot be read.
    """
    for path, owner in _configs(config):
        for key in CONFIG_KEYS:
            if owner.get(key):
                return Quantization(f"config.json: {path}{key}", owner[key])
        other = owner.get(_OTHER_ENGINES)
        if isinstance(other, dict) and any(other.get(key) for key in ("bits", "quant_algo", "quant_method")):
            return Quantization(f"config.json: {path}{_OTHER_ENGINES}", other)
    if folder is None:
        return None
    described = read_json_if_there(folder / _MODELOPT)
    inner = described.get("quantization")
    if isinstance(inner, dict) and inner:
        return Quantization(f"{_MODELOPT}: quantization", {"quant_method": "modelopt", **inner})
    if "quant_algo" in described:  # flat, as in config.json
        return Quantization(_MODELOPT, {"quant_method": "modelopt", **described})
    for name, bits, method in _FILES:
        content = read_json_if_there(folder / name)
        if any(key in content for key in bits):
            return Quantization(name, {"quant_method": method, **content})
    return None


def _configs(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config, then those of text models in it."""
    yield path, config
    for key in _TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, dict):
            yield from _configs(inner, f"{path}{key}.")
