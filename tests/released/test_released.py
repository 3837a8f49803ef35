"""config.json as publishers wrote them (README.md): served as docs/models.md says, with the numbers that transformers'
class reads in the same file, or refused for the reason told. Descriptions alone, no weights."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.gated_delta_config import GatedDeltaConfig
from minisgl_backend.layers.mixer_config import AttentionConfig, LatentAttentionConfig, RopeConfig
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.families import FAMILIES

HERE = Path(__file__).parent
SOURCES: dict[str, dict[str, Any]] = json.loads((HERE / "sources.json").read_text(encoding="utf-8"))
NATIVE = [name for name, row in SOURCES.items() if row.get("served") == "native"]
FALLBACK = [name for name, row in SOURCES.items() if row.get("served") == "transformers"]
REFUSED = [name for name, row in SOURCES.items() if "refused" in row]
OWN_CODE = {"hunyuan": "hunyuan_v1_moe", "kimi_k2": "deepseek_v3"}  # types of publishers' own -> of the same model
IN_EVERY_RUN = "microsoft--Phi-3.5-MoE-instruct"  # the others of transformers' code take seconds each
EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((HERE / "configs" / f"{name}.json").read_text(encoding="utf-8"))
    return config


def meant(config: dict[str, Any]) -> Any:
    """The text model's config as transformers' class reads it."""
    model_type = OWN_CODE.get(config["model_type"], config["model_type"])
    return CONFIG_MAPPING[model_type].from_dict({**config, "model_type": model_type}).get_text_config(decoder=True)


def test_every_file_has_a_source() -> None:
    assert {path.stem for path in (HERE / "configs").glob("*.json")} == set(SOURCES)
    assert sorted(NATIVE + FALLBACK + REFUSED) == sorted(SOURCES)
    for row in SOURCES.values():
        for source in (row, row.get("tokenizer", row)):
            assert source["address"].startswith("https://")
            assert source["commit"] in source["address"] or len(source["commit"]) == len("2023-10-27")


def test_the_readme_lists_families_without_one() -> None:
    found = {published(name)["architectures"][0] for name in NATIVE}
    page = (HERE / "README.md").read_text(encoding="utf-8").partition("## Families without one")[2]
    listed = set(re.findall(r"`(\w+For\w+)`", page))
    assert listed
    assert listed <= set(FAMILIES) - found


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_family_reads_it(name: str) -> None:
    config, row = published(name), SOURCES[name]
    read, text = ModelConfig.from_dicts(config, {}), meant(published(name))
    assert sorted(read.unknown_keys) == row.get("ignored", [])
    assert read.max_seq_len() == row.get("context", config.get("text_config", config).get("max_position_embeddings"))
    assert (read.num_layers, read.hidden_size) == (text.num_hidden_layers, text.hidden_size)
    assert read.vocab_size == text.vocab_size
    assert read.norm.eps == next(getattr(text, key) for key in EPS if hasattr(text, key))
    assert bool(read.quantization.rules) == ("quantization_config" in config)
    for layer, (attention, kind) in enumerate(zip((one.mixer for one in read.layers), kinds(text), strict=True)):
        if isinstance(attention, GatedDeltaConfig):
            assert kind == "linear_attention"
            heads = (text.linear_num_key_heads, text.linear_num_value_heads)
            assert (attention.num_k_heads, attention.num_v_heads) == heads
            assert (attention.k_dim, attention.v_dim) == (text.linear_key_head_dim, text.linear_value_head_dim)
            assert attention.conv_width == text.linear_conv_kernel_dim
            continue
        assert attention.num_q_heads == text.num_attention_heads
        if isinstance(attention, LatentAttentionConfig):
            assert (attention.kv_lora_rank, attention.v_head_dim) == (text.kv_lora_rank, text.v_head_dim)
            check_rope(attention.rope, text.rope_parameters)
            continue
        assert isinstance(attention, AttentionConfig)
        assert attention.num_kv_heads == (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        assert attention.head_dim == head_dim
        assert attention.window == (text.sliding_window if kind == "sliding_attention" else None), layer
        assert (attention.chunk is not None) == (kind == "chunked_attention")
        if attention.rope is not None and "alpha" not in text.rope_parameters:
            check_rope(attention.rope, text.rope_parameters.get(kind, text.rope_parameters))
        assert (attention.rope is None) == (not rotates(text, layer, kind))


def kinds(text: Any) -> list[str]:
    """The kind of attention of each layer; a window without kinds is one of all layers."""
    given = getattr(text, "layer_types", None)
    every = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    return given or [every] * text.num_hidden_layers


def rotates(text: Any, layer: int, kind: str) -> bool:
    if text.model_type == "exaone4":
        return kind == "sliding_attention"
    if text.model_type == "llama4_text":
        return bool(text.no_rope_layers[layer])
    return True


def check_rope(rope: RopeConfig, values: dict[str, Any]) -> None:
    assert (rope.theta, rope.type) == (values["rope_theta"], values["rope_type"])
    if rope.type != "default":
        assert rope.factor == values.get("factor", rope.factor)
        assert rope.original_max_position == values.get("original_max_position_embeddings", rope.original_max_position)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == IN_EVERY_RUN else [pytest.mark.full]) for name in FALLBACK]
)
def test_transformers_code_runs_it(name: str, tmp_path: Path) -> None:
    config = published(name)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read, text = load_model_config(tmp_path), meant(config)
    assert read.implementation == "transformers"
    assert (read.num_layers, read.hidden_size, read.vocab_size) == (
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
    )
    assert read.max_seq_len() == text.max_position_embeddings


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_the_reason_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(name)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_model_config(tmp_path)
    assert SOURCES[name]["refused"] in str(caught.value)
    assert len(str(caught.value)) < 800


WRONG: tuple[Any, ...] = (None, "x", [], ["x"], {}, {"x": 1}, -1, 1.5, math.nan, math.inf, True)
SHAPES = (
    "Qwen--Qwen3-235B-A22B",
    "google--gemma-3-1b-it",
    "meta-llama--Llama-3.2-1B",
    "microsoft--Phi-3.5-mini-instruct",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHAPES else [pytest.mark.full]) for name in NATIVE]
)
def test_a_value_of_any_type_is_read_or_refused_in_words(name: str) -> None:
    config = {"rope_scaling": {}, **published(name)}
    config["rope_scaling"] = {"type": "linear", "factor": 2.0, **(config["rope_scaling"] or {})}
    nested = [key for key, value in config.items() if isinstance(value, dict)]
    for outer, inner in [(key, None) for key in config] + [(key, one) for key in nested for one in config[key]]:
        for value in WRONG:
            changed = {**config, outer: value if inner is None else {**config[outer], inner: value}}
            with contextlib.suppress(ConfigError):
                ModelConfig.from_dicts(changed, {}).check_tensor_parallel(2)


def test_gemma_4_31b_is_native_but_for_its_format() -> None:
    """Of this size a file was found with NVFP4 weights alone."""
    config = published("nvidia--Gemma-4-31B-IT-NVFP4")
    read = ModelConfig.from_dicts({**config, "quantization_config": None}, {})
    assert (read.num_layers, read.max_position, read.unknown_keys) == (60, 262144, ())
    assert {(one.mixer.head_dim, one.mixer.window) for one in read.layers} == {(256, 1024), (512, None)}
    assert read.encoder is not None, read.why_no_images
    assert (read.encoder.merge, read.encoder.bidirectional, read.encoder.width) == (3, "windows", 5376)


@pytest.mark.parametrize("name", [name for name, row in SOURCES.items() if "tokenizer" in row])
def test_its_tokenizers_flags_are_read_beside_it(name: str, tmp_path: Path) -> None:
    """No flag is in the way of the model's config."""
    flags = SOURCES[name]["tokenizer"]["flags"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(flags), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(published(name)), encoding="utf-8")
    if SOURCES[name].get("served") == "native":
        read = ModelConfig.load(tmp_path)
        assert read.eos_token_ids
        assert read.max_seq_len() > 0
