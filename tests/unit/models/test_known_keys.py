"""Keys of config.json that a family does not read: ignored with a warning, or refused as another engine reads them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families import FAMILIES
from minisgl_backend.models.keys import Keys
from minisgl_backend.models.known_keys import READ_ELSEWHERE, ReadElsewhere, ReadElsewhereError, check_unread
from scripts import list_config_keys


def default(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json of a type's default model, that calls itself `architecture`."""
    config: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return {**config, "architectures": [architecture], **changes}


def test_the_file_is_not_stale() -> None:
    """Else: python scripts/list_config_keys.py with the newest transformers."""
    known = json.loads(list_config_keys.FILE.read_text(encoding="utf-8"))
    found = json.loads(list_config_keys.text(list_config_keys.content()))
    assert set(found["model_types"]) <= set(known["model_types"])
    for family in FAMILIES.values():
        own, of_file = (of["defaults"].get(family.model_type, {}) for of in (found, known))
        assert {key: of_file.get(key) for key in own} == own, family.model_type


RENAMED = [
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "seed_oss",
    "hunyuan_v1_dense",
    "ernie4_5",
    "exaone4",
    "qwen2_moe",
]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("model_type", RENAMED)
def test_another_familys_config_under_a_served_name(model_type: str, architecture: str) -> None:
    with pytest.raises(ConfigError, match=f'model_type is "{model_type}"'):
        ModelConfig.from_dicts(default(model_type, architecture), {})


# Keys of other types, as released config.json have them (the first), or as a model that was renamed would.
FOREIGN: list[tuple[str, str, Any]] = [
    ("Gemma2ForCausalLM", "sliding_window_size", 4096),
    ("LlamaForCausalLM", "attn_logit_softcapping", 50.0),
    ("LlamaForCausalLM", "query_pre_attn_scalar", 256),
    ("LlamaForCausalLM", "attention_multiplier", 0.0078125),
    ("LlamaForCausalLM", "no_rope_layers", [1, 1, 1, 0]),
    ("LlamaForCausalLM", "qk_layernorm", True),
    ("LlamaForCausalLM", "clip_qkv", 8.0),
    ("LlamaForCausalLM", "num_local_experts", 8),
    ("LlamaForCausalLM", "attention_chunk_size", 8192),
    ("LlamaForCausalLM", "rope_interleave", True),
    ("Qwen3ForCausalLM", "kv_lora_rank", 512),
    ("Qwen3MoeForCausalLM", "n_group", 8),
    ("Qwen2MoeForCausalLM", "scoring_func", "sigmoid"),
    ("Phi3ForCausalLM", "qk_layernorm", True),
    ("MixtralForCausalLM", "n_routed_experts", 64),
    ("GraniteForCausalLM", "position_embedding_type", "nope"),
    ("Exaone4ForCausalLM", "use_qk_norm", True),
    ("Gemma3ForCausalLM", "altup_num_inputs", 4),
]


@pytest.mark.parametrize(("architecture", "key", "value"), FOREIGN)
def test_a_key_that_the_types_class_does_not_have_changes_nothing(architecture: str, key: str, value: Any) -> None:
    config = default(FAMILIES[architecture].model_type, architecture, eos_token_id=2)
    plain = ModelConfig.from_dicts(config, {})
    read = ModelConfig.from_dicts({**config, key: value}, {})
    assert read.unknown_keys == (key,)
    assert dataclasses.replace(read, unknown_keys=()) == plain


@pytest.mark.parametrize("row", READ_ELSEWHERE, ids=lambda row: row.key)
def test_a_key_that_another_engine_reads_for_the_type_is_refused(row: ReadElsewhere) -> None:
    defaults = json.loads(list_config_keys.FILE.read_text(encoding="utf-8"))["defaults"]
    types = row.model_types.split() or [one for one in defaults if row.key not in defaults[one]]
    assert set(types) <= set(defaults)
    assert row.source.startswith("https://")
    for one in types:
        assert row.key not in defaults[one]
        with pytest.raises(ReadElsewhereError, match=f"^config.json: {row.key} is 7; allowed: absent for {one}: "):
            check_unread(Keys({row.key: 7}), one, 1 << 20)
        check_unread(Keys({row.key: row.harmless}), one, 1 << 20)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "finetuned": True},  # Yarn-Llama-2
        {"rope_type": "linear", "factor": 4.0, "beta_fast": 3.0},
        {"rope_type": "default", "low_freq_factor": 2.0},
    ],
)
def test_a_key_of_a_rope_that_its_type_does_not_have_changes_nothing(rope: dict[str, Any]) -> None:
    config = default("llama", "LlamaForCausalLM", rope_parameters=None)
    unknown = list(rope)[-1]
    read = ModelConfig.from_dicts({**config, "rope_scaling": rope}, {})
    assert read.unknown_keys == (f"rope_scaling.{unknown}",)
    known = {key: value for key, value in rope.items() if key != unknown}
    plain = ModelConfig.from_dicts({**config, "rope_scaling": known}, {})
    assert dataclasses.replace(read, unknown_keys=()) == plain


def test_a_key_of_a_rope_that_another_engine_reads_is_refused() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "long_mscale": 1.2}
    config = default("llama", "LlamaForCausalLM", rope_parameters=None, rope_scaling=scaling)
    with pytest.raises(ReadElsewhereError, match=r"rope_scaling.long_mscale is 1.2; allowed: absent for llama"):
        ModelConfig.from_dicts(config, {})


@pytest.mark.parametrize("value", [None, False, "full_attention", ["full_attention"] * 4])
def test_their_harmless_values_pass(value: Any) -> None:
    assert check_unread(Keys({"layer_types": value}), "granite", 8) == ()
    with pytest.raises(ReadElsewhereError, match="layer_types"):
        check_unread(Keys({"layer_types": ["full_attention", "sliding_attention"]}), "granite", 8)


@pytest.mark.parametrize("off", [{"sliding_window": 4096}, {"sliding_window": 512, "use_sliding_window": False}])
def test_a_window_that_nothing_reaches_passes(off: dict[str, Any]) -> None:
    assert "sliding_window" not in check_unread(Keys(off), "llama", 4096)
    with pytest.raises(ReadElsewhereError, match="sliding_window"):
        check_unread(Keys({"sliding_window": 512}), "llama", 4096)


def test_transformers_code_does_not_take_what_it_would_ignore(tmp_path: Path) -> None:
    """Its class has no such key either."""
    config = default("qwen2", "Qwen2ForCausalLM", dual_chunk_attention_config={"chunk_size": 262144}, eos_token_id=2)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^config.json: dual_chunk_attention_config is [^.]*absent for qwen2"):
        load_model_config(tmp_path)


def test_keys_that_change_nothing_pass() -> None:
    config = default("llama", "LlamaForCausalLM", use_cache=False, pretraining_tp=2)
    assert ModelConfig.from_dicts(config, {}).unknown_keys == ()


def test_keys_that_transformers_does_not_know_are_told() -> None:
    assert ModelConfig.from_dicts(default("llama", "LlamaForCausalLM", flux=3), {}).unknown_keys == ("flux",)
