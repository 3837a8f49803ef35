"""A key that config.json does not have means what it means to transformers' config class.

transformers writes every key, so that no checkpoint that it made would show another default here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl_backend.errors import ConfigError
from minisgl_backend.models import config as model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.description import DecoderConfig
from minisgl_backend.models.families import FAMILIES
from minisgl_backend.models.keys import Keys
from tests.parity.checkpoints import CHECKPOINTS
from tests.unit.models.test_families import default

_NAMES = ("architectures", "model_type")  # of the class itself

# (class, key): the class's own default is no model, or another key says the same.
_LEFT_OUT = {
    ("DeepseekV3Config", "num_key_value_heads"): "latents have as many as there are heads, whatever the class says",
    ("Glm4MoeLiteConfig", "num_key_value_heads"): "as in DeepSeek V3",
    ("YoutuConfig", "num_key_value_heads"): "as in DeepSeek V3",
    ("Gemma4TextConfig", "rope_parameters.full_attention.rope_type"): "stands in every model",
    ("Gemma4Config", "rope_parameters.full_attention.rope_type"): "as above",
    ("Qwen3VLMoeConfig", "tie_word_embeddings"): "counts in the outer config alone",
}


def decoder(config: Mapping[str, Any]) -> dict[str, Any] | str:
    """What is computed, or why it is not served."""
    try:
        found = ModelConfig.from_dicts(config, {})
    except ConfigError as error:
        return str(error)
    return {field.name: getattr(found, field.name) for field in fields(DecoderConfig)}


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of each key, and of those of a rope."""
    for key, value in values.items():
        yield (key,)
        if isinstance(value, dict) and key in ("rope_parameters", "full_attention", "sliding_attention"):
            yield from ((key, *path) for path in _paths(value))


def wrong_defaults(config_class: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The keys of a config with all keys without which another model would be served than transformers'."""
    unread: set[str] = set()

    def note(keys: Keys, *_: Any) -> tuple[str, ...]:
        unread.update(keys.unread())
        return ()

    monkeypatch.setattr(model_config, "check_unread", note)
    inner = "text_config" if "text_config" in config else None
    assert isinstance(decoder(config), dict)
    text = config[inner] if inner else config
    for path in _paths({key: text[key] for key in sorted(text.keys() - unread - {*_NAMES})}):
        key = ".".join(path)
        if key.endswith("_token_id") or (config_class.__name__, key) in _LEFT_OUT:
            continue
        absent = copy.deepcopy(config)
        outer = absent[inner] if inner else absent
        for name in path[:-1]:
            outer = outer[name]
        del outer[path[-1]]
        served = decoder(absent)
        if isinstance(served, str) and (served.startswith("config.json has no ") or path[-1] in served):
            continue  # required, and a model has it
        try:
            meant = config_class.from_dict(copy.deepcopy(absent)).to_json_string(use_diff=False)
        except Exception:  # transformers refuses it, in one of many ways
            continue
        if served != decoder({**json.loads(meant), "architectures": config["architectures"]}):
            yield key


def test_every_key_of_these_has_the_classes_default(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, list[str]] = {}
    for name, make in CHECKPOINTS.items():
        plan = make()
        wrong = list(wrong_defaults(type(plan.config), plan.config_json, monkeypatch))
        found |= {name: wrong} if wrong else {}
    assert found == {}


def test_a_wrong_default_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check above, in a family of which three were tried."""
    plan = CHECKPOINTS["stablelm"]()
    given = Keys.boolean

    def other(keys: Keys, key: str, default: bool) -> bool:
        return given(keys, key, not default if key in ("use_qkv_bias", "use_parallel_residual") else default)

    monkeypatch.setattr(Keys, "boolean", other)
    wrong = set(wrong_defaults(type(plan.config), plan.config_json, monkeypatch))
    assert wrong == {"use_qkv_bias", "use_parallel_residual"}


@pytest.mark.parametrize("architecture", ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"])
def test_layers_of_gemma4_are_numbered_with_zeros_before(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers numbers them in models of more than ten layers."""
    config = default(architecture, eos_token_id=2)
    text = config.get("text_config", config)
    text["eos_token_id"] = 2
    assert "05" in text["per_layer_config"]
    heads = [layer.mixer.head_dim for layer in ModelConfig.from_dicts(config, {}).layers]
    assert heads == [512 if kind == "full_attention" else 256 for kind in text["layer_types"]]
    config_class = CONFIG_MAPPING[FAMILIES[architecture].model_type]
    assert list(wrong_defaults(config_class, config, monkeypatch)) == []
    for wrong in ("x", "99"):
        text["per_layer_config"] = {wrong: {"head_dim": 512}}
        with pytest.raises(ConfigError, match="per_layer_config"):
            ModelConfig.from_dicts(config, {})
