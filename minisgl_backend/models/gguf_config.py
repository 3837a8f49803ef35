"""config.json of a model in a GGUF file. Needs neither torch nor gguf.

llama.cpp's keys are translated to those that a family reads. Values missing in a file's metadata are llama.cpp's
built-in ones, or the family's defaults.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError
from minisgl_backend.weights.gguf_header import GGUFHeader
from minisgl_backend.weights.gguf_names import ARCHITECTURES, GGUFArchitecture

_KEYS = {  # key after the architecture's name -> key of config.json
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_BY_LAYER = frozenset(  # keys whose value may be a list, with one of each layer
    {
        *("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length"),
        "attention.sliding_window_pattern",
    }
)
_NO_HEAD_DIM = ("phi3", "qwen2", "qwen2moe")  # their families derive it
# As in llama.cpp, for the largest models, which it recognises by their number of layers: scores are scaled as if heads
# had that size.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Every n-th layer sees everything, the others through a window, where attention.sliding_window_pattern is absent.
_PATTERNS = {"gemma2": 2, "gemma3": 6}
_SOFT_CAPS: Mapping[str, Mapping[str, float | None]] = {  # llama.cpp's, where the key is absent
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"final_logit_softcapping": None},
}
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
_LFM2 = ("lfm2", "lfm2moe")
_ROPE_THETA = 10000.0
_UNSET = -1.0  # yarn_ext_factor, and all of yarn_*, in files that llama.cpp's own writer made
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FREQUENCIES = "rope_freqs.weight"
_LONG = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_SAMPLING = {  # key after general.sampling. -> key of generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_NO_POOLING = (0, -1, 2**32 - 1)


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
    return ARCHITECTURES[str(name)]


def config_of(header: GGUFHeader, *, bos: int | None, eos: int | None) -> dict[str, Any]:
    """The content of config.json. `bos`, `eos`: token ids. Raises ConfigError naming a missing key or a value that is
    not served."""
    kind = architecture_of(header)
    values = _Values(header)
    config: dict[str, Any] = {"architectures": [kind.architecture], "model_type": kind.model_type}
    config |= {"bos_token_id": bos, "eos_token_id": eos}
    config |= {name: values.need(key) for key, name in _KEYS.items()}
    if values.name in _LFM2:
        config |= _lfm2(values, config["num_hidden_layers"]) | {"norm_eps": config.pop("rms_norm_eps")}
    else:
        config["num_key_value_heads"] = values.same_in_layers("attention.head_count_kv", config["num_attention_heads"])
    config["intermediate_size"] = values.same_in_layers("feed_forward_length")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{header.files[0]} has no tensor token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    plain = {tensor.type.name for tensor in header.tensors.values()} == {"F32"}
    config["dtype"] = config["torch_dtype"] = "float32" if plain else "bfloat16"
    derived = config["hidden_size"] // config["num_attention_heads"]
    head_dim = values.get("attention.key_length") or derived
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        values.only(f"attention.{key}", (head_dim,), f"the size of a head ({head_dim})", head_dim)
    values.only("embedding_length_out", (0, config["hidden_size"]), f"embedding_length ({config['hidden_size']})", 0)
    if values.name not in _NO_HEAD_DIM:
        config["head_dim"] = head_dim
    elif head_dim != derived:
        values.refuse("attention.key_length", f"embedding_length / attention.head_count ({derived})")
    return config | _family(values, config, head_dim) | _rope(values, config, head_dim)


def generation_config_of(header: GGUFHeader, ends: Sequence[int]) -> dict[str, Any]:
    """The content of generation_config.json: `ends`, and the sampling that a file recommends."""
    found = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {"eos_token_id": list(ends), **{name: value for name, value in found.items() if value is not None}}


def pooling_of(header: GGUFHeader) -> str | None:
    """The kind of pooling, in sentence-transformers' words; None: no embedding model. Raises ConfigError."""
    values = _Values(header)
    kind = values.get("pooling_type")
    if kind is None or kind in _NO_POOLING:
        return None
    if kind not in _POOLINGS:
        names = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        values.refuse("pooling_type", f"0 (none), {names}; rerankers are served from their folders")
    return _POOLINGS[kind]


class _Values:
    """Metadata of the file's architecture."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.name: str = header.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        """None where it is absent. All but the type of a scaling are numbers, or lists of them. Raises ConfigError."""
        value = self.header.metadata.get(f"{self.name}.{key}")
        kinds: tuple[type, ...] = (str,) if key == "rope.scaling.type" else (int, float)
        listed = isinstance(value, list) and key in _BY_LAYER
        if value is not None and not all(isinstance(one, kinds) for one in (value if listed else [value])):
            self.refuse(key, "a text" if str in kinds else "numbers" if key in _BY_LAYER else "a number")
        return value

    def need(self, key: str) -> Any:
        value = self.same_in_layers(key)
        if value is None:
            raise ConfigError(f"{self.header.files[0]} has no {self.name}.{key} in its metadata")
        if not value > 0:
            self.refuse(key, "more than 0")
        return value

    def same_in_layers(self, key: str, default: Any = None) -> Any:
        """A value that may be given by layer."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(key, "the same in all layers")
            value = value[0]
        return default if value is None else value

    def only(self, key: str, served: Sequence[Any], allowed: str, default: Any) -> None:
        """Refuses other values; `default`: llama.cpp's."""
        value = self.get(key)
        if (default if value is None else value) not in served:
            self.refuse(key, allowed)

    def refuse(self, key: str, allowed: str) -> NoReturn:
        value = self.header.metadata.get(f"{self.name}.{key}")
        raise ConfigError(f"{self.header.files[0]}: {self.name}.{key} is {value!r:.200}; allowed: {allowed}")

    def floats(self, name: str) -> list[float]:
        """A vector of float32."""
        tensor = self.header.tensors[name]
        if tensor.type.name != "F32":
            raise ConfigError(f"{tensor.file}: {name} has the quantization type {tensor.type.name}; allowed: F32")
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{math.prod(tensor.shape)}f", file.read(tensor.nbytes)))


def _family(values: _Values, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What only some architectures have."""
    found: dict[str, Any] = {}
    layers = config["num_hidden_layers"]
    if values.name in _PATTERNS:
        is_largest = layers == _LAYERS_OF_27B[values.name]
        found["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim
        )
        for key, default in _SOFT_CAPS[values.name].items():
            cap = values.get(key)
            found[key] = default if cap is None else cap or None
        window = values.get("attention.sliding_window")
        window = 4096 if window is None and values.name == "gemma2" else window or None
        found["sliding_window"] = window
        found["layer_types"] = _layer_types(values, layers) if window else ["full_attention"] * layers
    if values.name == "llama":
        found["attention_bias"] = "blk.0.attn_output.bias" in values.header.tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in values.header.tensors
    if values.name == "phi3":
        found["sliding_window"] = values.get("attention.sliding_window") or None
    if values.name in _DELTA:
        found |= _delta(values)
    if values.name.endswith("moe") or values.name == "qwen3next":
        used = values.need("expert_used_count")
        found["num_experts"], found["num_experts_per_tok"] = values.need("expert_count"), used
        size = values.same_in_layers("expert_feed_forward_length") or (config["intermediate_size"] or 0) // used
        found["moe_intermediate_size"] = size
        if values.name in ("qwen2moe", "qwen3next", "qwen35moe"):
            shared = values.get("expert_shared_feed_forward_length") or config["intermediate_size"]
            found["shared_expert_intermediate_size"] = shared
        if values.name not in _LFM2:
            found["norm_topk_prob"] = values.name != "qwen2moe"
    elif config["intermediate_size"] is None:
        values.need("feed_forward_length")
    return found


def _delta(values: _Values) -> dict[str, Any]:
    """The gated delta rule, in the words of state spaces: a group is a key head, a step a value head."""
    num_v_heads, inner = values.need("ssm.time_step_rank"), values.need("ssm.inner_size")
    if inner % num_v_heads:
        values.refuse("ssm.inner_size", f"a multiple of ssm.time_step_rank ({num_v_heads})")
    return {
        "linear_num_key_heads": values.need("ssm.group_count"),
        "linear_num_value_heads": num_v_heads,
        "linear_key_head_dim": values.need("ssm.state_size"),
        "linear_value_head_dim": inner // num_v_heads,
        "linear_conv_kernel_dim": values.need("ssm.conv_kernel"),
        "full_attention_interval": values.get("full_attention_interval") or 4,
        "mtp_num_hidden_layers": 0,
    }


def _lfm2(values: _Values, layers: int) -> dict[str, Any]:
    """Layers without heads of keys have a convolution. Its files say the MLP's own size, which config.json adjusts."""
    heads = values.get("attention.head_count_kv")
    heads = heads[:layers] if isinstance(heads, list) else []
    if len(heads) < layers or len(set(heads) - {0}) != 1:
        values.refuse(
            "attention.head_count_kv", f"a list for {layers} layers: 0 where one has a convolution, else one number"
        )
    found = {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": values.need("shortconv.l_cache"),
    }
    if values.name == "lfm2":
        return found | {"block_auto_adjust_ff_dim": False}
    values.only("expert_gating_func", (2,), "2 (sigmoid)", 2)
    bias = values.header.tensors.keys() & {f"blk.{layer}.exp_probs_b.bias" for layer in range(layers)}
    num_dense = values.get("leading_dense_block_count")
    return {**found, "num_dense_layers": num_dense or 0, "use_expert_bias": bool(bias), "norm_topk_prob": True}


def _layer_types(values: _Values, num_layers: int) -> list[str]:
    pattern = values.get("attention.sliding_window_pattern")
    if pattern is None:
        pattern = _PATTERNS[values.name]
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            values.refuse("attention.sliding_window_pattern", f"an entry for each of the {num_layers} layers")
        windowed = [bool(one) for one in pattern[:num_layers]]
    else:
        windowed = [not pattern or layer % pattern < pattern - 1 for layer in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in windowed]


def _rope(values: _Values, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    theta = values.get("rope.freq_base")
    found: dict[str, Any] = {"rope_theta": _ROPE_THETA if theta is None else theta}
    if values.name == "gemma3":
        local = values.get("rope.freq_base_swa")
        found["rope_local_base_freq"] = _ROPE_THETA if local is None else local
    if values.name == "gemma2":
        values.only("rope.freq_base_swa", (found["rope_theta"],), "rope.freq_base", found["rope_theta"])
    rotated = values.get("rope.dimension_count") or head_dim
    if rotated != head_dim:
        if values.name not in ("phi3", *_DELTA):
            values.refuse("rope.dimension_count", f"the size of a head ({head_dim})")
        found["partial_rotary_factor"] = rotated / head_dim
    values.only("rope.dimension_count_swa", (rotated,), f"rope.dimension_count ({rotated})", rotated)
    scaling = _scaling(values, config, rotated, found["rope_theta"])
    if scaling:
        found["rope_scaling"] = scaling
    if scaling.get("type") == "longrope":
        original = values.get("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    return found


def _scaling(values: _Values, config: Mapping[str, Any], rotary_dim: int, theta: float) -> dict[str, Any]:
    """llama.cpp has three parts, which may come together: a type with a factor, factors in tensors, and a factor of
    cosines and sines; here are the scalings that transformers knows. {}: none."""
    tensors = values.header.tensors.keys() & ARCHITECTURES[values.name].rope_tensors
    kind = values.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        values.refuse("rope.scaling.type", "none, linear, yarn, longrope")
    factor_key = "rope.scale_linear" if values.get("rope.scaling.factor") is None else "rope.scaling.factor"
    factor = values.get(factor_key)
    attention = values.get("rope.scaling.attn_factor")
    attention = 1.0 if attention is None else attention
    if kind in ("linear", "yarn") and factor is None:
        raise ConfigError(
            f"{values.header.files[0]}: {values.name}.rope.scaling.type is {kind!r}, but there is no "
            f"{values.name}.rope.scaling.factor; allowed: both, or the type 'none'"
        )
    is_long = all(name in tensors for name in _LONG.values())
    if kind == "longrope" and not is_long:
        raise ConfigError(
            f"{values.header.files[0]}: {values.name}.rope.scaling.type is 'longrope', but there are no tensors "
            f"{' and '.join(_LONG.values())}; allowed: all of them, or the type 'none'"
        )
    scales = factor not in (None, 0.0, 1.0) and kind != "none"
    if scales and (is_long or _FREQUENCIES in tensors):
        values.refuse(
            factor_key, f"1.0, or absent, beside the tensor {_LONG['long_factor'] if is_long else _FREQUENCIES}"
        )
    if is_long:
        return {
            "type": "longrope",
            **{key: values.floats(name) for key, name in _LONG.items()},
            "attention_factor": attention,
        }
    if scales and kind == "yarn":
        return _yarn(values, config, factor, attention)
    values.only("rope.scaling.attn_factor", (1.0,), "1.0, or absent, but with YaRN and LongRoPE", 1.0)
    if _FREQUENCIES in tensors:
        return _llama3(values, theta, rotary_dim)
    return {"rope_type": "linear", "factor": factor} if scales else {}


def _yarn(values: _Values, config: Mapping[str, Any], factor: float, attention: float) -> dict[str, Any]:
    """The keys yarn_* are what llama.cpp's converter took from config.json; its loader does not read them of the
    architectures here."""
    original = values.get("rope.scaling.original_context_length") or config["max_position_embeddings"]
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if (beta := values.get(f"rope.scaling.yarn_{key}")) is not None:
            scaling[key] = beta

    def mscale(of: float) -> float:
        return 0.1 * of * math.log(factor) + 1.0 if factor > 1 else 1.0

    own = values.get("rope.scaling.yarn_attn_factor")
    if own is None or values.get("rope.scaling.yarn_ext_factor") == _UNSET:
        own = mscale(1.0) / mscale(values.get("rope.scaling.yarn_log_multiplier") or 0.0)
    if attention != 1.0 and values.name == "gemma3":
        values.refuse("rope.scaling.attn_factor", "1.0 or absent, since layers with a window would have it, too")
    if own * attention != mscale(1.0):
        scaling["attention_factor"] = own * attention
    return scaling


def _llama3(values: _Values, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, of which files only have the result: the divisor of each frequency."""
    found = values.floats(_FREQUENCIES)
    scaling = {"rope_type": "llama3", "factor": max(found), **_LLAMA3}
    original = _LLAMA3["original_max_position_embeddings"]
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
