"""What config.json may say, in both spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig
from minisgl_backend.layers.mixer_config import AttentionConfig, NormConfig, RopeConfig
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.generation import GenerationDefaults

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def read(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dicts({**LLAMA, **changes}, generation or {})


def test_reads_sizes() -> None:
    config = read()
    assert (config.num_layers, config.layers[0].mixer.num_kv_heads, config.head_dims) == (2, 2, (16,))
    attention = AttentionConfig(num_q_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(theta=10000.0))
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(intermediate_size=96), norm=NormConfig(eps=1e-5))
    assert config.layers == (layer,) * 2
    assert config.mixture is None
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING}},
    ],
)
def test_both_spellings_of_rope(spelling: dict[str, Any]) -> None:
    rope = read(**spelling).layers[0].mixer.rope
    assert rope == RopeConfig(
        type="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=128,
    )


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_spellings_of_dtype(key: str) -> None:
    assert read(**{key: "bfloat16"}).dtype == "bfloat16"


def test_rope_scaling_beside_rope_parameters_counts() -> None:
    """As transformers 5.23 reads them: configs saved by it, with a rope_scaling that their user added."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    saved = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert read(**saved, rope_scaling={**yarn, "rope_theta": 5e5}) == read(rope_theta=5e5, rope_scaling=yarn)
    assert read(**saved, rope_theta=5e5, rope_scaling=yarn) == read(rope_theta=5e5, rope_scaling=yarn)
    assert read(**saved, rope_scaling=None).layers[0].mixer.rope == RopeConfig(theta=5e5)
    assert read(rope_parameters=yarn, rope_scaling={"rope_type": "default"}).layers[0].mixer.rope == RopeConfig()
    with pytest.raises(ConfigError, match=r"rope_parameters has rope_theta 500000.0, but transformers ignores"):
        read(**saved, rope_scaling=yarn)


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert read(rope_scaling=scaling).max_position == 4096


def test_number_of_experts_in_both_spellings() -> None:
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    }
    old, new = read(**moe, num_experts=8), read(**moe, num_local_experts=8)
    assert old == new
    dense, mixture = (layer.mlp for layer in old.layers)
    assert isinstance(dense, MlpConfig)
    assert isinstance(mixture, MoeConfig)
    assert mixture.num_experts == 8


REFUSED: list[dict[str, Any]] = [
    {"architectures": ["GPT2LMHeadModel"]},
    {"architectures": []},
    {"quantization_config": {"quant_method": "hqq"}},
    {"hidden_act": "relu"},
    {"mlp_bias": "yes"},
    {"sliding_window": "512"},
    {"rope_theta": "1e6"},
    {"layer_types": ["full_attention", "linear_attention"]},
    {"partial_rotary_factor": 0.5},
    {"hidden_size": 0},
    {"hidden_size": "64"},
    {"vocab_size": None},
    {"num_key_value_heads": 3},
    {"eos_token_id": 4096},
    {"eos_token_id": "</s>"},
    {"dtype": "float8_e4m3fn"},
    {"tie_word_embeddings": "yes"},
]


@pytest.mark.parametrize("changes", REFUSED, ids=lambda changes: next(iter(changes)))
def test_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        read(**changes)


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}, "long_factor"),
        ({"rope_type": "proportional", "factor": 2.0}, "rope_type"),
        ({"type": "linear"}, "factor"),
        ({"rope_type": "yarn"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "yarn", "factor": 0.0}, "factor"),
        ({"rope_type": "default", "mrope_section": 2}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_parameters"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_refused_by_name(key: str, rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**{key: rope})


_MISTRAL = {"architectures": ["MistralForCausalLM"]}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "head_dim": 16}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({**_MISTRAL, "sliding_window": None}, (None, None)),
        ({**_MISTRAL, "sliding_window": 512}, (512, 512)),
        ({**_MISTRAL, "sliding_window": 1024}, (1024, 1024)),  # as long as the context
        (_MISTRAL, (4096, 4096)),
        ({**_MISTRAL, "sliding_window": 1024, "layer_types": [_SLIDING, _FULL]}, (None, None)),
        ({**_MISTRAL, "max_position_embeddings": 8192}, (4096, 4096)),
        ({**_MISTRAL, "sliding_window": 512, "layer_types": [_SLIDING] * 2}, (512, 512)),
        ({**_QWEN2, "sliding_window": 512, "use_sliding_window": False}, (None, None)),
        ({**_QWEN2, "sliding_window": 512, "max_window_layers": 1}, (None, 512)),
        ({**_QWEN2, "sliding_window": 512, "max_window_layers": 0}, (512, 512)),
        ({**_QWEN2, "sliding_window": 512, "max_window_layers": 2}, (None, None)),
        ({**_QWEN2, "sliding_window": 512}, (None, None)),  # from layer 28 on
        ({**_QWEN2, "max_window_layers": 1, "max_position_embeddings": 8192}, (None, 4096)),
        ({**_QWEN3, "sliding_window": 512, "layer_types": [_FULL, _SLIDING]}, (None, 512)),
        ({**_QWEN3, "sliding_window": 512, "layer_types": [_SLIDING, _FULL], "max_window_layers": 0}, (512, None)),
        ({**_QWEN3_MOE, "sliding_window": 512, "max_window_layers": 2}, (512, 512)),
        ({**_QWEN3_MOE, "sliding_window": None}, (None, None)),
        ({**_QWEN3_MOE, "sliding_window": 1024, "layer_types": [_SLIDING, _FULL]}, (None, None)),
        ({"sliding_window": 1024}, (None, None)),
        ({**_QWEN2, **_YARN, "sliding_window": 1024, "max_window_layers": 1}, (None, 1024)),
        ({**_MISTRAL, **_YARN, "sliding_window": 1024}, (1024, 1024)),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = read(**changes)
    assert tuple(layer.mixer.window for layer in config.layers) == windows
    assert config.max_seq_len() == config.max_position


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 512}, "sliding_window"),  # Llama has none
        ({**_YARN, "sliding_window": 1024}, "sliding_window"),
        ({**_MISTRAL, **_YARN, "sliding_window": 1024, "layer_types": [_FULL, _SLIDING]}, "layer_types"),
        ({**_QWEN3_MOE, **_YARN, "sliding_window": 1024, "layer_types": [_FULL, _SLIDING]}, "layer_types"),
        ({**_MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({**_MISTRAL, "sliding_window": "512"}, "sliding_window"),
        ({**_MISTRAL, "sliding_window": 512, "layer_types": [_FULL, _SLIDING]}, "layer_types"),
        ({**_QWEN2, "sliding_window": 512, "layer_types": [_FULL]}, "layer_types"),
        ({**_QWEN2, "sliding_window": 512, "max_window_layers": "1"}, "max_window_layers"),
    ],
)
def test_windows_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**changes)


def test_scales_of_an_fp8_cache_are_no_quantization_of_weights() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    read(quantization_config={"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme})
    for changes in (
        {"config_groups": {"group_0": {"targets": ["Linear"]}}, "kv_cache_scheme": scheme},
        {"kv_cache_scheme": {**scheme, "type": "int"}},
        {"kv_cache_scheme": {**scheme, "dynamic": True}},
        {"kv_cache_scheme": None},
    ):
        with pytest.raises(ConfigError, match="quantization_config"):
            read(quantization_config={"quant_method": "compressed-tensors", **changes})


def test_the_longest_sequence_may_be_made_shorter_never_longer() -> None:
    assert read().max_seq_len() == 1024
    assert read().max_seq_len(10) == 10
    with pytest.raises(ConfigError, match="max_seq_len_override is 1025; allowed: 2 to 1024"):
        read().max_seq_len(1025)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 2},
            GenerationDefaults(temperature=0.0, repetition_penalty=2.0),
        ),
        ({"top_k": -1, "top_p": 0}, GenerationDefaults(top_k=0, top_p=1.0)),
        ({"top_k": 50.0, "temperature": None}, GenerationDefaults(top_k=50)),
    ],
)
def test_generation_defaults(generation: dict[str, Any], expected: GenerationDefaults) -> None:
    assert read(generation).generation == expected


def test_every_end_token_counts() -> None:
    assert read({"eos_token_id": [5, 7, 5]}).eos_token_ids == (5, 7, 2)
    assert read({"eos_token_id": 0}).eos_token_ids == (0, 2)
    assert read({"eos_token_id": None}).eos_token_ids == (2,)
    assert read({}, eos_token_id=None).eos_token_ids == ()
    assert ModelConfig.from_dicts(LLAMA, {"eos_token_id": [5]}, 9).eos_token_ids == (5, 2, 9)
    assert ModelConfig.from_dicts(LLAMA, {}, 4096).eos_token_ids == (2,)  # the model has no such token
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is 128; allowed: 0 to"):
        read({"eos_token_id": 128})


def test_a_wrong_generation_value_is_named() -> None:
    with pytest.raises(ConfigError, match="temperature"):
        read({"temperature": "hot"})


def test_tensor_parallel_size_must_divide_heads() -> None:
    read().check_tensor_parallel(2)
    read().check_tensor_parallel(4)  # two ranks for each of two KV heads
    with pytest.raises(ConfigError, match=r"tp is 8.*num_attention_heads"):
        read().check_tensor_parallel(8)
    six = read(num_attention_heads=12, num_key_value_heads=4, head_dim=16)
    with pytest.raises(ConfigError, match=r"tp is 6.*num_key_value_heads"):
        six.check_tensor_parallel(6)


def test_load_reads_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert ModelConfig.load(tmp_path).generation.temperature == 0.0


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="LoRA"):
        ModelConfig.load(tmp_path)


def test_a_long_value_is_not_repeated_whole() -> None:
    ignored = [f"model.layers.{layer}.mlp.down_proj" for layer in range(100)]
    with pytest.raises(ConfigError, match=r"quantization_config.skipped is .*\.\.\.; allowed: absent") as caught:
        read(quantization_config={"quant_method": "fp8", "skipped": ignored})
    assert len(str(caught.value)) < 350
