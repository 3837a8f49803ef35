"""What config.json may say, in both spellings, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import GenerationDefaults, ModelConfig, RopeConfig

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
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.moe is None
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
    rope = read(**spelling).rope
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
    assert old.moe is not None
    assert old.moe.num_experts == 8
    assert old.moe.dense_layers == {0}


REFUSED: list[dict[str, Any]] = [
    {"architectures": ["GPT2LMHeadModel"]},
    {"architectures": []},
    {"quantization_config": {"quant_method": "gptq"}},
    {"hidden_act": "gelu"},
    {"mlp_bias": True},
    {"sliding_window": 512},
    {"sliding_window": "512"},
    {"rope_theta": "1e6"},
    {"layer_types": ["full_attention", "linear_attention"]},
    {"partial_rotary_factor": 0.5},
    {"final_logit_softcapping": 30.0},
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
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope_type"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type"),
        ({"type": "linear", "factor": 2.0}, "linear"),
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


@pytest.mark.parametrize(
    ("changes", "active"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, False),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 1024}, False),
        ({"architectures": ["MistralForCausalLM"]}, False),  # 4096 is meant, and the context is shorter
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, True),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": False}, False),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            True,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            False,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            True,
        ),
    ],
)
def test_sliding_window_is_refused_only_where_it_acts(changes: dict[str, Any], active: bool) -> None:
    if active:
        with pytest.raises(ConfigError, match="sliding_window"):
            read(**changes)
    else:
        read(**changes)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05),
        ),
    ],
)
def test_generation_defaults(generation: dict[str, Any], expected: GenerationDefaults) -> None:
    assert read(generation).generation == expected


def test_generation_config_decides_the_eos_tokens() -> None:
    assert read({"eos_token_id": [5, 7, 5]}).eos_token_ids == (5, 7)
    assert read().eos_token_ids == (2,)


def test_a_wrong_generation_value_is_named() -> None:
    with pytest.raises(ConfigError, match="temperature"):
        read({"temperature": "hot"})


def test_tensor_parallel_size_must_divide_heads() -> None:
    read().check_tensor_parallel(2)
    with pytest.raises(ConfigError, match=r"tp is 4.*num_key_value_heads"):
        read().check_tensor_parallel(4)


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
