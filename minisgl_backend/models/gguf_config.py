"""config.json of a model in a GGUF file. Needs neither torch nor gguf.

llama.cpp's keys are translated to those that a family reads. Values missing in a file's metadata are llama.cpp's
built-in ones, or the family's defaults.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.gguf_header import GGUFHeader
from minisgl_backend.weights.gguf_names import ARCHITECTURES, GGUFArchitecture

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_KEYS = {  # key after the architecture's name -> key of config.json
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL_KEYS = {
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
}
_KEYS_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SOFT_CAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_KEYS_OF: Mapping[str, Mapping[str, str]] = {
    "gemma2": _SOFT_CAPS,
    "gemma3": {"rope.freq_base_swa": "rope_local_base_freq"},
    "qwen2moe": {**_KEYS_OF_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    "qwen3moe": _KEYS_OF_EXPERTS,
}
_WITH_WINDOWS = ("gemma2", "gemma3", "phi3")
_NO_HEAD_DIM = ("phi3", "qwen2", "qwen2moe")  # their families derive it
# As in llama.cpp, for the largest models, which it recognises by their number of layers: scores are scaled as if heads
# had that size.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Texts of tokens that end a turn, which metadata often does not name; llama.cpp also recognises them by text.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
_CONTROL = 3


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """The architecture of a file. Raises ConfigError, listing the supported ones, for another."""
    file, metadata = header.files[0], header.metadata
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{file}: general.type is {kind!r}; allowed: 'model'")
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        allowed = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"{file}: general.architecture is {name!r}; allowed: {allowed}. Other models are served from their "
            "folders in Hugging Face format"
        )
    if name == "llama" and metadata.get("llama.expert_count", 0):
        raise ConfigError(f"{file}: llama.expert_count is {metadata['llama.expert_count']}; allowed: 0 or absent")
    return ARCHITECTURES[str(name)]


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """The content of config.json. Raises ConfigError naming a missing key or an unsupported value."""
    kind = architecture_of(header)
    values = _Values(header)
    config: dict[str, Any] = {"architectures": [kind.architecture], "model_type": kind.model_type}
    config |= {name: values.need(key) for key, name in _KEYS.items()}
    optional = {**_OPTIONAL_KEYS, **_KEYS_OF.get(values.name, {})}
    config |= {name: found for key, name in optional.items() if (found := values.get(key)) is not None}
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{header.files[0]} has no tensor token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    plain = {tensor.type.name for tensor in header.tensors.values()} == {"F32"}
    config["dtype"] = config["torch_dtype"] = "float32" if plain else "bfloat16"
    for key in ("bos", "eos"):
        config[f"{key}_token_id"] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    head_dim = values.get("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    if values.name not in _NO_HEAD_DIM:
        config["head_dim"] = head_dim
    if values.name in _WITH_WINDOWS:
        config["sliding_window"] = values.get("attention.sliding_window") or None
    if config["num_hidden_layers"] == _LAYERS_OF_27B.get(values.name):
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    if values.name == "qwen3moe":
        config["norm_topk_prob"] = True
    return config | _rope(values, config, head_dim)


def end_tokens_of(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an output: end of text, and end of turn."""
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    by_text = [
        number
        for number, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and text in _ENDS_OF_TURN
    ]
    return list(dict.fromkeys(token for token in (*named, *by_text) if isinstance(token, int)))


class _Values:
    """Metadata of the file's architecture."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.name: str = header.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.name}.{key}")

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.header.files[0]} has no {self.name}.{key} in its metadata")
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(key, "the same in all layers")
            return value[0]
        return value

    def refuse(self, key: str, allowed: str) -> NoReturn:
        raise ConfigError(f"{self.header.files[0]}: {self.name}.{key} is {self.get(key)!r}; allowed: {allowed}")

    def floats(self, name: str) -> list[float]:
        """A vector of float32."""
        tensor = self.header.tensors[name]
        if tensor.type.name != "F32":
            raise ConfigError(f"{tensor.file}: {name} has the quantization type {tensor.type.name}; allowed: F32")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.nbytes)))


def _rope(values: _Values, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rotated = values.get("rope.dimension_count")
    if rotated and rotated != head_dim:
        if values.name != "phi3":
            values.refuse("rope.dimension_count", f"the size of a head ({head_dim})")
        found["partial_rotary_factor"] = rotated / head_dim
    scaling = values.get("rope.scaling.type")
    factor, original = values.get("rope.scaling.factor"), values.get("rope.scaling.original_context_length")
    if "rope_freqs.weight" in values.header.tensors:
        found["rope_scaling"] = _llama3(values, config, rotated or head_dim)
    elif "rope_factors_long.weight" in values.header.tensors:
        names = ("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")
        found["rope_scaling"] = {"type": "longrope", **{key: values.floats(name) for key, name in names}}
        if values.get("rope.scaling.attn_factor"):
            found["rope_scaling"]["attention_factor"] = values.get("rope.scaling.attn_factor")
        found["original_max_position_embeddings"] = original or 4096
    elif scaling == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn":
        found["rope_scaling"] = {"rope_type": "yarn", "factor": factor}
        if original:
            found["rope_scaling"]["original_max_position_embeddings"] = original
    elif scaling not in (None, "none"):
        values.refuse("rope.scaling.type", "none, linear, yarn")
    return found


def _llama3(values: _Values, config: Mapping[str, Any], rotary_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, of which files only have the result: the divisor of each frequency."""
    found = values.floats("rope_freqs.weight")
    scaling = {"rope_type": "llama3", "factor": max(found), **_LLAMA3}
    theta, original = config.get("rope_theta", 10000.0), _LLAMA3["original_max_position_embeddings"]
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    for position, value in enumerate(found):
        turns = original / (2 * math.pi * theta ** (2 * position / rotary_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        if abs(value * ((1 - smooth) / scaling["factor"] + smooth) - 1) > 1e-3:
            raise ConfigError(
                f"{values.header.files[0]}: rope_freqs.weight has {value:.4g} at {position}; allowed: the factors of "
                "Llama 3.1's scaling from 8192 tokens"
            )
    return scaling
