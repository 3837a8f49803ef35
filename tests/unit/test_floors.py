"""The floors of docs/performance.md are the arithmetic that it explains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.comparison import PEERS
from benchmarks.floors import Floors
from benchmarks.layer_costs import FORMATS, layer_costs
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.models.config import ModelConfig


def floors(model: str, limits: Limits | None = None) -> Floors:
    return Floors(ModelConfig.from_dicts(SHAPES[model], {}), limits or Limits())


def test_a_dense_step_reads_every_weight_and_the_cache() -> None:
    # 440.4 M in the layers, 155.6 M in the tied embeddings; 114,688 bytes of keys and values a token
    weights = 2 * (440_401_920 + 155_582_464)
    assert floors("qwen3-0.6b").decode_bytes([1024] * 8) == weights + 8 * 1024 * 114_688


def test_a_step_of_experts_reads_those_that_its_tokens_reach() -> None:
    moe = floors("qwen3-30b-a3b")
    assert moe.distinct_experts(1) == 8
    assert moe.distinct_experts(8) == pytest.approx(51.6, abs=0.1)
    assert moe.distinct_experts(256) == pytest.approx(128, abs=0.1)
    expert, others = 48 * 3 * 2048 * 768, 48 * (2 * (32 + 4) * 128 * 2048 + 128 * 2048) + 151_936 * 2048
    assert moe.decode_bytes([1024]) == 2 * (others + 8 * expert) + 1024 * 98_304
    # All experts, with the input embeddings that a step does not read: the 30.5 billion of the name.
    assert others + 128 * expert + 151_936 * 2048 == pytest.approx(30.5e9, rel=0.01)


def test_a_step_reads_each_state_once_half_a_page_of_tail_and_its_share_of_a_fold() -> None:
    card = floors("qwen3.5-9b-text")
    rows, entry = 8, 16 * 128 * 2 + 32 * (128 + 1) * 4
    state = (1 + 2 / 32) * (2 << 20) + (31 / 2 + 1 + 1) * entry
    more = card.decode_bytes([1024] * (1 + rows)) - card.decode_bytes([1024])
    assert more == rows * (24 * state + 1024 * 8 * 2 * 4 * 256 * 2)
    # Weights read: 8.95 billion with the head, without the input embeddings.
    assert card.decode_bytes([0]) - 24 * state == pytest.approx(2 * 7.94e9, rel=0.01)


def test_many_rows_are_bound_by_products() -> None:
    slow = Limits(bytes_per_s=4.58e12, flop_per_s=1e12)
    assert floors("qwen3-14b", slow).decode_s([0] * 256) == pytest.approx(256 * 2 * 13.99e9 / 1e12, rel=0.01)
    assert floors("qwen3-14b").decode_s([0]) == pytest.approx(2 * 13.99e9 / 4.58e12, rel=0.01)


def test_committed_floors_are_those_of_the_command() -> None:
    known = json.loads(PEERS.read_text())
    committed = {name: value for entry in known["floors"] for name, value in entry["figures"].items()}
    computed: dict[str, float] = {}
    for model, prefix in (("qwen3-0.6b", "q06"), ("qwen3-14b", "q14"), ("qwen3-30b-a3b", "q30")):
        computed |= floors(model).figures(prefix)
    assert committed == computed


# gpt-oss-20b: experts in MXFP4, layers with a window of 128 tokens in turn with those without.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201088,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "attention_bias": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 200002,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "formats", "gigabytes"),
    [
        (SHAPES["qwen3-14b"], {}, 27.98),
        (SHAPES["qwen3-14b"], {"weights": "fp8"}, 14.78),  # the head stays as it is
        (SHAPES["qwen3-14b"], {"weights": "int4"}, 8.42),
        (SHAPES["qwen3-30b-a3b"], {}, 6.08),
        (GPT_OSS, {"experts": "mxfp4"}, 3.70),
        (GPT_OSS, {}, 7.21),
        (SHAPES["deepseek-v2-lite"], {}, 4.90),
    ],
)
def test_bytes_of_one_token(model: dict[str, Any], formats: dict[str, str], gigabytes: float) -> None:
    found = Floors(ModelConfig.from_dicts(model, {}), Limits(), **formats).decode_bytes([0])
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize(
    ("model", "patches", "encoder_ms", "first_ms"),
    [("qwen2.5-vl-7b", 10_764, 27, 87), ("qwen3-vl-8b", 3_520, 7.9, 30), ("qwen3-vl-8b", 47_376, 537, 813)],
)
def test_an_image_is_encoded_before_its_prompt(model: str, patches: int, encoder_ms: float, first_ms: float) -> None:
    """At 600 TFLOP/s, without what turns patches into vectors."""
    found = floors(model, Limits(flop_per_s=600e12))
    assert 1000 * found.encoder_s(patches) == pytest.approx(encoder_ms, rel=0.08)
    assert found.image_ms(patches, 64) == pytest.approx(first_ms, rel=0.1)
    with pytest.raises(ConfigError, match="no encoder"):
        floors("qwen3-8b").encoder_s(patches)


def test_a_window_bounds_what_is_read_of_the_cache() -> None:
    windows = Floors(ModelConfig.from_dicts(GPT_OSS, {}), Limits(), experts="mxfp4")
    kept = 2 * 8 * 64 * 2  # bytes a token and layer
    cache = windows.decode_bytes([1000, 50]) - windows.decode_bytes([0, 0])
    assert cache == pytest.approx(12 * kept * (1000 + 50) + 12 * kept * (128 + 50))
    half = Floors(ModelConfig.from_dicts(GPT_OSS, {}), Limits(), kv_number_bytes=1)
    assert half.decode_bytes([1000]) - half.decode_bytes([0]) == pytest.approx(12 * kept / 2 * (1000 + 128))


def test_latents_are_read_once_for_all_heads_and_multiplied_by_each() -> None:
    model = SHAPES["deepseek-v2-lite"]
    latent = floors("deepseek-v2-lite")
    assert latent.decode_bytes([1024]) - latent.decode_bytes([0]) == pytest.approx(27 * 1024 * 576 * 2)
    slow = floors("deepseek-v2-lite", Limits(bytes_per_s=1e18, flop_per_s=1e12))
    absorbed = 2 * model["num_attention_heads"] * (576 + 512)
    assert slow.decode_s([1024]) - slow.decode_s([0]) == pytest.approx(27 * 1024 * absorbed / 1e12)


def test_a_prompt_in_windows_has_fewer_pairs() -> None:
    costs = layer_costs(
        ModelConfig.from_dicts(GPT_OSS, {}).layers[0], 2880, weights=FORMATS["plain"], experts=FORMATS["mxfp4"],
        kv_number_bytes=2,
    )  # fmt: skip
    assert costs.pairs(100) == 5000
    assert costs.pairs(1000) == pytest.approx(sum(min(i, 128) for i in range(1000)), rel=0.01)


def test_rates_of_data_sheets() -> None:
    assert Limits.nominal(DeviceFacts.named("a100")) == Limits(2.039e12, 312e12)
    with pytest.raises(ConfigError, match="CPU has no rates here"):
        Limits.nominal(DeviceFacts.cpu())
