"""Engine options with wrong values are refused by name, with the value and what is allowed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from minisgl_backend import LLM
from minisgl_backend.config import OPTIONS, EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError

WRONG: dict[str, tuple[Any, ...]] = {
    "model": ("", "  "),
    "dtype": ("int8", 16),
    "kv_cache_dtype": ("int8", 8),
    "quantization": ("int4", "plain", 8),
    "attention_backend": ("flash", "fa,fi,torch", "fa,"),
    "page_size": (0, 3, -16, 16.0, True),
    "num_pages": (0, -1, "many"),
    "num_state_slots": (1, -2, "two"),
    "memory_ratio": (0, 1.1, -0.5, "half", float("nan")),
    "encoder_cache_mib": (-1, "none"),
    "max_image_tokens": (0, "all"),
    "max_images": (0, 101, None),
    "media_domains": ("a b", "A.example", "a,,b", "*.", "http://a", None, 5),
    "image_workers": (0, 65, "all"),
    "image_cache_mib": (-1, None),
    "max_prefill_length": (0, -8, "8k"),
    "mixed_prefill_length": (-1, "most"),
    "max_running_requests": (0, 4097, 1.5),
    "max_waiting_requests": (0, None),
    "max_seq_len_override": (1, -5),
    "cuda_graph_max_bs": (-1, "all"),
    "cuda_graph_max_tokens": (-1, "all"),
    "cache_type": ("lru", None),
    "schedule_policy": ("sjf", ""),
    "background_slowdown": (0.9, "twice", float("nan")),
    "adapters": ("a", "a=", "=folder", "a=x,a=y", 5),
    "merge_adapter": ("", " "),
    "max_adapters": (0, -1, "all"),
    "adapter_dir": ("", " ", 5),
    "max_lora_rank": (0, 513, "all"),
    "max_loaded_adapters": (0, -1, "all"),
    "max_adapter_tasks": (-1, 1001, "all"),
    "tp": (0, -2, None),
    "dp": (0, 65, None, "two"),
    "nodes": (0, 65, None, "all"),
    "rendezvous": ("node0", ":29600", "node0:0", 29600),
    "kv_events_endpoint": ("5557", "udp://*:5557"),
    "kv_events_replay_endpoint": ("5657", "tcp://*"),
    "kv_events_topic": (5, None),
    "disable_pynccl": ("yes", 1, None),
    "dummy_weights": ("maybe", 0),
    "model_impl": ("vllm", True),
    "enable_embeddings": ("maybe", 0),
    "speculative_config": ("ngram", 5, "[]"),
    "fair_shares": ("perhaps", 2),
    "tenant_weights": (5, "a", "a=0", "a=1,a=2"),
    "max_waiting_requests_per_tenant": (0, "few"),
    "trust_remote_code": ("no", 2),
    "idle_cpus": ("awake", True),
    "runner": ("vllm",),
    "null_runner_rate": (-1.0, "fast", float("nan")),
}
WRONG_TEXTS = {
    "page_size": ("three", "24", "1e3"),
    "memory_ratio": ("lots", "2", "nan"),
    "disable_pynccl": ("yes", "2"),
    "tp": ("two", ""),
    "dtype": ("fp8", ""),
}
NOT_FOR_THE_DEMO_MODEL: dict[str, dict[str, Any]] = {
    "tp is 3": {"tp": 3},
    "tp is 16": {"tp": 16},
    "max_seq_len_override is 5000": {"max_seq_len_override": 5000},
    "no_such_folder": {"model": "./no_such_folder"},
    "attention_backend is": {"attention_backend": "trtllm", "page_size": 16},
}


def test_every_option_is_tried() -> None:
    assert set(WRONG) == set(OPTIONS)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{name: value})
    assert str(refused.value) == f"{name} is {value!r}; allowed: {OPTIONS[name].allowed}"


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG_TEXTS.items() for text in texts])
def test_a_wrong_text_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is '?{re.escape(text)}.*; allowed: "):
        EngineConfig.from_parameters({name: text})


def test_a_placeholder_that_nobody_filled_in_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"num_pages is '\$\{NUM_PAGES\}'.*remove the line or set a value"):
        EngineConfig.from_parameters({"num_pages": "${NUM_PAGES}"})


def test_an_unknown_option_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"num_page; did you mean num_pages"):
        EngineConfig.from_parameters({"num_page": "5"})


@pytest.mark.parametrize(("words", "options"), NOT_FOR_THE_DEMO_MODEL.items(), ids=NOT_FOR_THE_DEMO_MODEL)
def test_what_the_model_or_machine_cannot_do_is_refused_at_load(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        LLM(**{"num_pages": 16, **options})
    assert words in str(refused.value)


def test_a_wrong_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="MINISGL_DISABLE_OVERLAP_SCHEDULING is 'yes'; allowed: 0 or 1"):
        Environment.read({"MINISGL_DISABLE_OVERLAP_SCHEDULING": "yes"})
    values = {"1": False, "0": True, "": None}
    for text, overlap in values.items():
        assert Environment.read({"MINISGL_DISABLE_OVERLAP_SCHEDULING": text}).overlap is overlap
