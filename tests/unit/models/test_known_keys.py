"""Keys of config.json that a family does not read: what other decoders compute differently is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families import FAMILIES
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
    assert set(found["keys"]) <= set(known["keys"])
    for family in FAMILIES.values():
        for key, groups in found["keys"].items():
            own = [value for value, types in groups if family.model_type in types]
            assert own in ([], [value for value, types in known["keys"][key] if family.model_type in types]), key


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


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, "partial_rotary_factor"),
        ("granite", {"attention_multiplier": 0.0078125}, "attention_multiplier"),
        ("granite", {"attention_multiplier": None, "logits_scaling": 8.0}, "logits_scaling"),
        ("smollm3", {}, "no_rope_layer"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias"),
        ("ernie4_5", {"use_bias": True}, "use_bias"),
        ("exaone4", {}, "layer_types"),
        ("qwen2_moe", {"sliding_window": None}, "max_window_layers"),
    ],
)
def test_its_keys_are_refused_without_a_model_type(model_type: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_dicts({**default(model_type, "LlamaForCausalLM", **changes), "model_type": None}, {})


def test_keys_that_change_nothing_pass() -> None:
    config = default("llama", "LlamaForCausalLM", use_cache=False, pretraining_tp=2)
    assert ModelConfig.from_dicts(config, {}).unknown_keys == ()


def test_keys_that_transformers_does_not_know_are_told() -> None:
    assert ModelConfig.from_dicts(default("llama", "LlamaForCausalLM", flux=3), {}).unknown_keys == ("flux",)
