"""The option speculative_config: what it takes, and what it says to all else."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.speculative_config import MOST_DRAFTS, SpeculativeConfig, most_decode_entries


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ('{"method": "ngram"}', (MOST_DRAFTS, 5, 2)),
        ({"method": "ngram", "num_speculative_tokens": "auto"}, (MOST_DRAFTS, 5, 2)),
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}, (4, 3, 2)),
        ({"method": "ngram", "prompt_lookup_max": 1}, (MOST_DRAFTS, 1, 1)),
        ({"method": "ngram", "prompt_lookup_min": 7}, (MOST_DRAFTS, 7, 7)),
        ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}, (MOST_DRAFTS, 4, 3)),
    ],
)
def test_as_vllm_spells_it(given: Any, meant: tuple[int, int, int]) -> None:
    most, longest, shortest = meant
    assert EngineConfig(speculative_config=given).speculation == SpeculativeConfig(
        method="ngram", most_drafts=most, prompt_lookup_max=longest, prompt_lookup_min=shortest
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("ngram", "allowed: a JSON object such as"),
        ("[1]", "allowed: a JSON object such as"),
        ({"method": "medusa"}, "its method is 'medusa'; allowed: ngram"),
        ({"num_speculative_tokens": 3}, "its method is None; allowed: ngram"),
        (
            {"method": "ngram", "rank": 4},
            "it has the unknown key 'rank'; allowed: method, model, num_",
        ),
        ({"method": "ngram", "model": "x"}, "its model is 'x'; allowed with the method ngram: unset"),
        ({"method": "deepseek_mtp", "model": "x"}, "its model is 'x'; allowed with the method mtp: unset"),
        ({"method": ["mtp"]}, r"its method is \['mtp'\]; allowed: ngram"),
        ({"method": "draft_model"}, "its model is None; allowed with the method draft_model: the folder of a model"),
        ({"method": "eagle3", "model": 1}, "its model is 1; allowed with the method eagle3: the folder of a model"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "its num_speculative_tokens is 0; allowed: 1 to 15, or"),
        ({"method": "ngram", "num_speculative_tokens": True}, "its num_speculative_tokens is True; allowed"),
        ({"method": "ngram", "prompt_lookup_max": 99}, "its prompt_lookup_max is 99; allowed: 1 to 32"),
        (
            {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3},
            "its prompt_lookup_min is 3; allowed: 1 to 2, which is prompt_lookup_max",
        ),
    ],
)
def test_what_is_not_meant_is_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config is .*; {why}"):
        EngineConfig(speculative_config=given)


def test_a_parameter_that_is_empty_means_none() -> None:
    assert EngineConfig.from_parameters({"speculative_config": ""}).speculation is None
    assert EngineConfig.from_parameters({"speculative_config": '{"method": "ngram"}'}).speculation is not None


def test_a_method_may_have_a_model() -> None:
    found = EngineConfig(speculative_config={"method": "draft_model", "model": "x", "num_speculative_tokens": 3})
    assert found.speculation is not None
    assert (found.speculation.method, found.speculation.model, found.speculation.most_drafts) == ("draft_model", "x", 3)


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp"])
def test_a_layer_of_the_checkpoint_has_vllms_names(method: str) -> None:
    found = EngineConfig(speculative_config={"method": method, "num_speculative_tokens": 1}).speculation
    assert found is not None
    assert (found.method, found.model, found.most_drafts) == ("mtp", None, 1)


def test_entries_are_bounded() -> None:
    config = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 4}).speculation
    assert [most_decode_entries(running, config) for running in (1, 8, 64, 256)] == [5, 40, 64, 256]
    assert most_decode_entries(8, None) == 8
