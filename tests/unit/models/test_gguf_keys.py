"""Each metadata key that llama.cpp's loader reads for the architectures here: read, refused by name, or told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.gguf_config import config_of, generation_config_of, pooling_of
from minisgl_backend.models.gguf_keys import check_keys
from minisgl_backend.weights.gguf_header import NUMBER_TYPES, GGUFHeader, GGUFTensor
from minisgl_backend.weights.gguf_names import ARCHITECTURES

FILE = Path("model.gguf")
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48}
# What llama.cpp's load_hparams reads of every architecture: a value that is not its default.
OF_EVERY_ONE: Mapping[str, Any] = {
    "context_length": 256, "block_count": 3, "embedding_length": 128, "embedding_length_out": 32,
    "attention.causal": False, "pooling_type": 3, "classifier.pooling_type": 2, "classifier.output_labels": ["yes"],
    "nextn_predict_layers": 1, "expert_count": 4, "expert_used_count": 1, "expert_group_count": 2,
    "expert_group_used_count": 1, "feed_forward_length": 80, "attention.head_count": 2, "attention.head_count_kv": 1,
    "rope.scaling.finetuned": True, "rope.scaling.original_context_length": 16, "rope.freq_base": 5e5,
    "rope.scaling.type": "longrope", "rope.scaling.factor": 2.0, "rope.scale_linear": 2.0,
    "rope.scaling.attn_factor": 1.5, "rope.scaling.alpha": 1000.0, "attention.key_length": 8,
    "attention.value_length": 8, "rope.dimension_count": 8, "attention.key_length_swa": 8,
    "attention.value_length_swa": 8, "rope.dimension_count_swa": 8, "attention.layer_norm_rms_epsilon": 1e-3,
    # It reads these of other architectures, while its converter writes them for these ones, too.
    "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_attn_factor": 0.5,
    "rope.scaling.yarn_log_multiplier": 0.5, "rope.scaling.yarn_ext_factor": 0.5,
}  # fmt: skip
_DELTA = ("qwen3next", "qwen35", "qwen35moe")
DELTA: Mapping[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
}  # fmt: skip
_OTHER_DELTA: Mapping[str, Any] = {
    "ssm.conv_kernel": 3, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.inner_size": 64,
    "full_attention_interval": 2,
}  # fmt: skip
_OTHER_EXPERTS: Mapping[str, Any] = {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 24}
OF_SOME: Mapping[str, Mapping[str, Any]] = {
    "llama": {"vocab_size": 7},
    "gemma2": {
        "attention.sliding_window": 8, "attention.sliding_window_pattern": 1, "rope.freq_base_swa": 5e5,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "attention.sliding_window": 8, "attention.sliding_window_pattern": 1, "rope.freq_base_swa": 5e5,
        "final_logit_softcapping": 5.0,
    },
    "lfm2": {"shortconv.l_cache": 4},
    "lfm2moe": {
        "shortconv.l_cache": 4, "leading_dense_block_count": 1, "expert_gating_func": 1,
        "expert_feed_forward_length": 24,
    },
    "phi3": {"attention.sliding_window": 8},
    "qwen2moe": _OTHER_EXPERTS,
    "qwen3moe": {"expert_feed_forward_length": 24},
    "qwen3next": {**_OTHER_DELTA, **_OTHER_EXPERTS},
    "qwen35": _OTHER_DELTA,
    "qwen35moe": {**_OTHER_DELTA, **_OTHER_EXPERTS},
}  # fmt: skip
# Of other architectures: they change nothing here, as in llama.cpp.
OF_OTHERS: Mapping[str, Any] = {
    "logit_scale": 0.5, "residual_scale": 0.5, "embedding_scale": 12.0, "attention.scale": 0.1,
    "attention.temperature_length": 8192, "attention.temperature_scale": 0.1, "attention.clamp_kqv": 8.0,
    "attention.max_alibi_bias": 8.0, "attention.output_scale": 0.5, "expert_weights_scale": 2.5,
    "expert_weights_norm": True, "expert_gating_func": 2, "expert_shared_count": 1, "router_logit_softcapping": 30.0,
    "leading_dense_block_count": 1, "interleave_moe_layer_step": 2, "hidden_activation": "gelu",
    "use_parallel_residual": True, "attention.layer_norm_epsilon": 1e-5, "swiglu_clamp_exp": [7.0],
    "attention.q_lora_rank": 8, "a_key_of_tomorrow": 3,
}  # fmt: skip
# They change neither tokens nor numbers. The others of experts' groups: where there are groups.
WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "classifier.pooling_type", "expert_group_used_count"}
# Only with YaRN; the original length also with LongRoPE.
OF_YARN = {
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", *(key for key in OF_EVERY_ONE if "yarn_" in key)
}  # fmt: skip


def header(architecture: str, **changes: Any) -> GGUFHeader:
    """`changes`: behind the architecture's name, or whole keys where it is in them already; None: absent."""
    values = {
        "context_length": 128, "block_count": 2, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 16 if architecture.startswith("gemma") else None,
        **(EXPERTS if architecture.endswith("moe") or architecture == "qwen3next" else {}),
        **(DELTA if architecture in _DELTA else {}),
        **({"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3} if architecture.startswith("lfm2") else {}),
        **changes,
    }  # fmt: skip
    prefixes = ("general.", "tokenizer.")
    metadata = {
        key if key.startswith(prefixes) else f"{architecture}.{key}": value
        for key, value in values.items()
        if value is not None
    }
    table = GGUFTensor(file=FILE, type=NUMBER_TYPES[0], shape=(40, 64), offset=0)
    names = ("token_embd.weight", "output.weight")
    return GGUFHeader(
        files=(FILE,),
        metadata={"general.architecture": architecture, **metadata},
        tensors=dict.fromkeys(names, table),
    )


def read(file: GGUFHeader) -> tuple[Any, ...]:
    check_keys(file, file.metadata["general.architecture"])
    return config_of(file, bos=1, eos=2), pooling_of(file), generation_config_of(file, [2])


def outcome(architecture: str, key: str, value: Any, caplog: pytest.LogCaptureFixture) -> str:
    base = YARN if key in OF_YARN else {}
    before = read(header(architecture, **base))
    caplog.clear()
    try:
        after = read(header(architecture, **{**base, key: value}))
    except ConfigError as error:
        return "refused" if f"{architecture}.{key} is " in str(error) and "allowed: " in str(error) else str(error)
    if f"{architecture}.{key}" in caplog.text:
        assert after == before
        return "told"
    return "nothing" if after == before else "read"


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_each_key_that_llama_cpp_reads(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = {**OF_EVERY_ONE, **OF_SOME.get(architecture, {})}
    found = {key: outcome(architecture, key, value, caplog) for key, value in keys.items()}
    assert {key for key, what in found.items() if what == "nothing"} == WITHOUT_EFFECT & keys.keys()
    assert set(found.values()) == {"read", "refused", "nothing"}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("value", [["a"], [1.5, 1.5], [], [2, 1], "a"])
def test_a_value_of_another_type_is_refused_by_name(
    architecture: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Lists are for values of each layer; some of these are such."""
    for key in {**OF_EVERY_ONE, **OF_SOME.get(architecture, {})}:
        what = outcome(architecture, key, value, caplog)
        assert what in ("refused", "nothing", "read"), key
        if key in ("block_count", "pooling_type", "rope.freq_base", "rope.scaling.attn_factor", "rope.dimension_count"):
            assert what == "refused", key


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_keys_of_other_architectures_are_told(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    for key, value in OF_OTHERS.items():
        if key in OF_SOME.get(architecture, {}):
            continue
        assert outcome(architecture, key, value, caplog) == "told", key
        # What llama.cpp's own writer puts into every file switches nothing on.
        assert outcome(architecture, key, type(value)(), caplog) == "nothing", key


def test_defaults_of_llama_cpps_own_writer_are_served() -> None:
    written = {
        "attention.causal": True, "nextn_predict_layers": 0, "expert_count": 0, "expert_used_count": 0,
        "expert_group_count": 0, "expert_group_used_count": 0, "pooling_type": 2**32 - 1, "rope.scaling.type": "linear",
        "rope.scaling.factor": 0.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": -1.0,
        "rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.0, "attention.key_length": 16, "attention.value_length": 16,
        "attention.key_length_swa": 16, "rope.dimension_count": 16, "rope.dimension_count_swa": 16,
        "rope.dimension_sections": [0, 0, 0, 0], "attn_logit_softcapping": 50.0, "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert read(header("llama", **written)) == read(header("llama"))


def test_missing_values_are_llama_cpps() -> None:
    config = read(header("gemma2", **{"attention.sliding_window": None}))[0]
    assert config["sliding_window"] == 4096
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["query_pre_attn_scalar"] == config["head_dim"] == 16
    config = read(header("gemma3", **{"attention.sliding_window": None}))[0]
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["rope_theta"] == config["rope_local_base_freq"] == 10000.0
    sizes = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None}
    config = read(header("qwen2moe", **sizes))[0]
    assert (config["moe_intermediate_size"], config["shared_expert_intermediate_size"]) == (48, 96)
    assert read(header("qwen3", **{"attention.head_count_kv": None}))[0]["num_key_value_heads"] == 4


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, "sssssf"),
        ({"attention.sliding_window_pattern": 3}, "ssfssf"),
        ({"attention.sliding_window_pattern": [True, False, False, True, True, False]}, "sffssf"),
        ({"attention.sliding_window_pattern": [1, 0, 0, 1, 1, 0, 1]}, "sffssf"),
        ({"attention.sliding_window": 0}, "ffffff"),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], layers: str) -> None:
    found = read(header("gemma3", block_count=6, **changes))[0]["layer_types"]
    assert "".join(layer[0] for layer in found) == layers


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": 1.0}, None),
        (YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}),
        (
            {**YARN, "rope.scaling.original_context_length": None, "rope.scaling.yarn_beta_fast": 8.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 8.0},
        ),
    ],
)
def test_scaling_of_the_rope(changes: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert read(header("llama", **changes))[0].get("rope_scaling") == scaling


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"rope.scaling.attn_factor": 0.7}, 0.7 * 1.1386294361119891),
        ({"rope.scaling.yarn_attn_factor": 0.7, "rope.scaling.yarn_ext_factor": 1.0}, 0.7),
        ({"rope.scaling.yarn_attn_factor": 1.0}, 1.0),
        ({"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": -1.0}, None),
        ({"rope.scaling.yarn_log_multiplier": 1.0}, 1.0),
    ],
)
def test_factor_of_cosines_and_sines(changes: dict[str, Any], factor: float | None) -> None:
    found = read(header("qwen3", **YARN, **changes))[0]["rope_scaling"].get("attention_factor")
    assert found == (pytest.approx(factor) if factor else None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope.scaling.type": "linear"}, "rope.scaling.type is 'linear', but there is no qwen3.rope.scaling.factor"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', but there is no qwen3.rope.scaling.factor"),
        ({"rope.scaling.type": "longrope"}, "is 'longrope', but there are no tensors rope_factors_long.weight and"),
        ({"rope.scaling.factor": "4"}, "qwen3.rope.scaling.factor is '4'; allowed: a number"),
        ({"rope.scaling.type": 2}, "qwen3.rope.scaling.type is 2; allowed: a text"),
        ({"attention.head_count": 0}, "qwen3.attention.head_count is 0; allowed: more than 0"),
        ({"attention.head_count": [4, 2]}, r"qwen3.attention.head_count is \[4, 2\]; allowed: the same in all layers"),
        ({"pooling_type": 4}, r"qwen3.pooling_type is 4; allowed: .*rerankers are served from their folders"),
    ],
)
def test_messages_name_the_files_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.gguf: .*{said}") as caught:
        read(header("qwen3", **changes))
    assert "config.json" not in str(caught.value)


def test_sampling_that_a_file_recommends(caplog: pytest.LogCaptureFixture) -> None:
    values = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 2}
    with caplog.at_level(logging.WARNING):
        found = read(header("qwen3", **{f"general.sampling.{key}": value for key, value in values.items()}))[2]
    assert found == {
        "eos_token_id": [2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert "general.sampling.mirostat" in caplog.text
    assert "general.sampling.temp" not in caplog.text


def test_keys_of_the_tokenizer_that_are_not_read_are_told(caplog: pytest.LogCaptureFixture) -> None:
    unread = {
        "tokenizer.ggml.precompiled_charsmap": [1], "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.normalizer.lowercase": True, "tokenizer.ggml.suppress_tokens": [3],
        "tokenizer.huggingface.json": "{}", "tokenizer.rwkv.world": "x",
    }  # fmt: skip
    silent = {
        "tokenizer.ggml.fim_pre_token_id": 3,
        "tokenizer.chat_template": "x",
        "tokenizer.chat_template.tool_use": "x",
    }
    read(header("qwen3", **unread, **silent, **{"general.name": "x", "general.file_type": 7}))
    assert caplog.text.split("architecture: ")[1].strip().split(", ") == list(unread)
