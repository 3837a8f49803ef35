"""What a model folder says about its model: architecture, sizes, rope, context, end tokens, sampling defaults.

The only reader of config.json and generation_config.json; needs neither torch nor transformers. Both spellings of
transformers are read: `rope_theta` and `rope_scaling` of 4.x, `rope_parameters` of 5.x.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.models.end_tokens import end_tokens, read_end_of_text, token_ids
from minisgl_backend.models.json_files import read_json
from minisgl_backend.request import SamplingParams

_LLAMA = "LlamaForCausalLM"
_MISTRAL = "MistralForCausalLM"
_QWEN2 = "Qwen2ForCausalLM"
_QWEN3 = "Qwen3ForCausalLM"
_QWEN3_MOE = "Qwen3MoeForCausalLM"
ARCHITECTURES = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _QWEN3_MOE)
DTYPES = ("float32", "float16", "bfloat16")

_LONGEST_VALUE = 200  # characters of a value that a message repeats

# Keys that change the computation: the values under which this engine computes the right thing. Absent and null
# are always allowed.
_ONLY_SERVED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "dual_chunk_attention_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logits_soft_cap": (),
    "qk_layernorm": (False,),
    "use_mrope": (False,),
    "attention_chunk_size": (),
    "is_encoder_decoder": (False,),
}
_ROPE_TYPES = ("default", "llama3", "yarn")
_ROPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # required, optional
    "default": ((), ("factor", "original_max_position_embeddings")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields beyond `theta` are for the type that they name."""

    type: str = "default"  # default, llama3 or yarn
    theta: float = 10000.0
    factor: float = 1.0  # llama3, yarn
    original_max_position: int = 0  # llama3, yarn; tokens
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from factor, mscale and mscale_all_dim
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What layers of one model may have each of their own."""

    rope: RopeConfig
    window: int | None = None  # tokens that a token sees, the last of which is itself; None: all up to itself


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: the router picks `experts_per_token` of `num_experts` gated MLPs for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool
    dense_layers: frozenset[int]  # layers that have an ordinary MLP instead


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling values for requests that do not say, spelled as SamplingParams has them; None: the folder is silent."""

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling_values(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model, checked: an instance exists only for what this engine computes correctly."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int  # tokens; with YaRN the stretched length
    attention: tuple[LayerAttention, ...]  # by layer
    tie_word_embeddings: bool
    attention_bias: bool  # as config.json says; Qwen2 has its bias without this key
    dtype: str  # float32, float16 or bfloat16: the format the model was saved in
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]  # those of config.json, of generation_config.json and of the tokenizer
    bos_token_id: int | None
    generation: GenerationDefaults

    @classmethod
    def load(cls, model_dir: str | Path) -> ModelConfig:
        """Reads a model folder. Raises ConfigError naming file, key, value and what is allowed."""
        folder = Path(model_dir)
        if (folder / "adapter_config.json").exists():
            raise ConfigError(
                f"{folder} holds a LoRA adapter (adapter_config.json), which is not served; "
                "merge it into its base model and serve the result"
            )
        config = read_json(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        return cls.from_dicts(config, generation, read_end_of_text(folder))

    @classmethod
    def from_dicts(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer_eos: int | None = None
    ) -> ModelConfig:
        """From the contents of config.json and generation_config.json ({} where the model has none).

        `tokenizer_eos`: the token with which the tokenizer ends a text.
        """
        keys = _Keys(config)
        architecture = _architecture(config)
        _refuse_what_is_not_served(config)
        num_layers = keys.integer("num_hidden_layers")
        num_q_heads = keys.integer("num_attention_heads")
        hidden_size = keys.integer("hidden_size")
        position = keys.integer("max_position_embeddings")
        rope = _rope(config, position)
        windows = _windows(config, architecture, num_layers, position)
        model = cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_q_heads if architecture == _LLAMA else None),
            head_dim=keys.integer("head_dim", 128 if architecture == _QWEN3 else hidden_size // num_q_heads),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            max_position=max(position, int(rope.factor * rope.original_max_position) if rope.type == "yarn" else 0),
            attention=tuple(LayerAttention(rope=rope, window=window) for window in windows),
            tie_word_embeddings=keys.boolean("tie_word_embeddings", False),
            attention_bias=keys.boolean("attention_bias", False),
            dtype=_dtype(config),
            moe=_moe(keys, num_layers) if architecture == _QWEN3_MOE else None,
            eos_token_ids=end_tokens(config, generation, tokenizer_eos),
            bos_token_id=next(iter(token_ids("config.json: bos_token_id", config.get("bos_token_id"))), None),
            generation=_generation_defaults(generation),
        )
        model._check()
        return model

    def _check(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            _refuse("num_key_value_heads", self.num_kv_heads, f"a divisor of num_attention_heads ({self.num_q_heads})")
        if self.head_dim % 2:
            _refuse("head_dim", self.head_dim, "an even number")
        if self.attention_bias and self.architecture in (_MISTRAL, _QWEN2):
            _refuse("attention_bias", True, f"false or absent for {self.architecture}")

    def max_seq_len(self, override: int | None = None) -> int:
        """The longest sequence, prompt and answer, in tokens; `override` is the option max_seq_len_override.

        Raises ConfigError for more than the model provides for.
        """
        if override is not None and override > self.max_position:
            raise ConfigError(
                f"max_seq_len_override is {override}; allowed: 2 to {self.max_position}, the longest sequence that the "
                "model's config.json provides for"
            )
        return override or self.max_position

    @property
    def layer_weights_per_token(self) -> int:
        """The weights of all layers that one token is multiplied with; two operations each."""
        attention = 2 * (self.num_q_heads + self.num_kv_heads) * self.head_dim
        dense, moe = 3 * self.intermediate_size, self.moe
        if moe is None:
            return self.num_layers * self.hidden_size * (attention + dense)
        mixture = 3 * moe.intermediate_size * moe.experts_per_token + moe.num_experts
        num_dense = len(moe.dense_layers)
        mlps = num_dense * dense + (self.num_layers - num_dense) * mixture
        return self.hidden_size * (self.num_layers * attention + mlps)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError unless heads and MLPs split evenly over `size` ranks. Of more ranks than KV heads, several
        have the same one."""
        sizes = {"num_attention_heads": self.num_q_heads}
        if size % self.num_kv_heads:
            sizes["num_key_value_heads"] = self.num_kv_heads
        if self.moe is None or self.moe.dense_layers:
            sizes["intermediate_size"] = self.intermediate_size
        if self.moe is not None:
            sizes["moe_intermediate_size"] = self.moe.intermediate_size
        for key, value in sizes.items():
            if value % size:
                or_multiple = " or a multiple" if key == "num_key_value_heads" else ""
                raise ConfigError(
                    f"tp is {size}; allowed: a divisor{or_multiple} of the model's {key}, which is {value}"
                )


class _Keys:
    """Reads typed values from config.json, with the key's name in every error."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            _refuse(key, value, "an integer, 1 or more")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            _refuse(key, value, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            _refuse(key, value, "true or false")
        return bool(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"config.json has no {key}")
        return default


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        _refuse("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _refuse_what_is_not_served(config: Mapping[str, Any]) -> None:
    for key, served in _ONLY_SERVED.items():
        value = config.get(key)
        if key == "quantization_config" and _is_of_kv_cache_alone(value):
            continue
        if value is not None and value not in served:
            allowed = ", ".join(json.dumps(option) for option in served) or "absent: this is not served"
            _refuse(key, value, allowed)


def _is_of_kv_cache_alone(quantization: Any) -> bool:
    """Weights as they were, and scales for an FP8 KV cache: compressed-tensors' kv_cache_scheme without any group."""
    if not isinstance(quantization, dict) or quantization.get("config_groups"):
        return False
    scheme = quantization.get("kv_cache_scheme")
    return (
        isinstance(scheme, dict)
        and (scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy", "tensor")) == (8, "float", "tensor")
        and not scheme.get("dynamic")
    )


def _windows(
    config: Mapping[str, Any], architecture: str, num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    """The window of each layer as transformers has it; None: full attention."""
    layer_types = config.get("layer_types") or []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            _refuse("layer_types", layer_type, "full_attention, sliding_attention")
    if len(layer_types) not in (0, num_layers):
        _refuse("layer_types", layer_types, f"null, or one entry for each of the {num_layers} layers")
    window = _window(config, architecture, max_position)
    full: tuple[int | None, ...] = (None,) * num_layers
    if window is None:
        return full
    if architecture in (_QWEN2, _QWEN3):
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            _refuse("max_window_layers", first, "an integer")
        if layer_types:
            return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    # The others have one window for all layers, or none; transformers reads no layer_types for them.
    if len(set(layer_types)) > 1:
        _refuse("layer_types", layer_types, f"one type for all layers of {architecture}")
    return full if "full_attention" in layer_types else (window,) * num_layers


def _window(config: Mapping[str, Any], architecture: str, max_position: int) -> int | None:
    """The one size of all windows; None: no layer has any."""
    if architecture.startswith("Qwen") and not config.get("use_sliding_window"):
        return None
    # The config classes of Mistral and Qwen mean 4096 where the key is absent; null switches windows off.
    window = config.get("sliding_window", None if architecture == _LLAMA else 4096)
    if window is None:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        _refuse("sliding_window", window, "null or an integer, 1 or more")
    if architecture == _LLAMA and window < max_position:
        _refuse("sliding_window", window, f"null for {architecture}, whose layers have no windows")
    return int(window) if window < max_position else None


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    # As transformers 5.23: where both spellings are there, rope_scaling counts and rope_parameters does not.
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        _refuse("rope_parameters", given, "one set of values for all layers")
    values = {key: value for key, value in given.items() if value is not None}
    rope_type = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    theta = values.pop("rope_theta", config.get("rope_theta") or 10000.0)
    unread = config.get("rope_parameters")
    if isinstance(unread, dict) and unread.get("rope_theta", theta) != theta and given is not unread:
        raise ConfigError(
            f"config.json: rope_parameters has rope_theta {json.dumps(unread['rope_theta'])}, but beside rope_scaling "
            f"transformers reads none of it, which makes rope_theta {json.dumps(theta)}; allowed: the keys of "
            "rope_scaling written into rope_parameters, and no rope_scaling"
        )
    if rope_type not in _ROPE_TYPES:
        _refuse("rope_type", rope_type, ", ".join(_ROPE_TYPES))
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        _refuse("partial_rotary_factor", given["partial_rotary_factor"], "1.0")
    for key, value in {"rope_theta": theta, **values}.items():
        if key != "truncate" and (not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0):
            _refuse(key, value, "a number above 0")
    required, optional = _ROPE_KEYS[rope_type]
    for key in required:
        if key not in values:
            raise ConfigError(f"config.json asks for rope type {rope_type} without its {key}")
    for key in values:
        if key not in required + optional:
            _refuse(key, values[key], f"absent for rope type {rope_type}")
    if rope_type == "default":
        return RopeConfig(theta=float(theta))
    original = values.pop("original_max_position_embeddings", None)
    original = config.get("original_max_position_embeddings") or original or max_position
    return RopeConfig(type=rope_type, theta=float(theta), original_max_position=int(original), **values)


def _moe(keys: _Keys, num_layers: int) -> MoeConfig:
    config = keys._config
    num_experts = keys.integer("num_experts", config.get("num_local_experts"))  # renamed in transformers 5
    experts_per_token = keys.integer("num_experts_per_tok")
    if experts_per_token > num_experts:
        _refuse("num_experts_per_tok", experts_per_token, f"1 to num_experts ({num_experts})")
    step = keys.integer("decoder_sparse_step", 1)
    mlp_only = config.get("mlp_only_layers") or []
    dense = {layer for layer in range(num_layers) if layer in mlp_only or (layer + 1) % step != 0}
    return MoeConfig(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=keys.integer("moe_intermediate_size"),
        norm_topk_prob=keys.boolean("norm_topk_prob", False),
        dense_layers=frozenset(dense),
    )


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    if value not in DTYPES:
        _refuse("dtype", value, ", ".join(DTYPES))
    return str(value)


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    names = ["repetition_penalty"]
    if generation.get("do_sample") is not False:
        names += ["temperature", "top_k", "top_p", "min_p"]
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    try:
        params = SamplingParams(**given)
        params.validate()
    except InvalidRequestError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
    values = {name: getattr(params, name) for name in given}
    if generation.get("do_sample") is False:  # greedy, and nothing of the file acts on a request that samples
        values["temperature"] = 0.0
    return GenerationDefaults(**values)


def _refuse(key: str, value: Any, allowed: str) -> NoReturn:
    text = json.dumps(value, default=str)
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}..."
    raise ConfigError(f"config.json: {key} is {text}; allowed: {allowed}")
