"""The floors of docs/performance.md are the arithmetic that it explains."""

from __future__ import annotations

import json

import pytest

from benchmarks.comparison import PEERS
from benchmarks.floors import Floors
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES
from minisgl_backend.models.config import ModelConfig


def floors(model: str, limits: Limits | None = None) -> Floors:
    return Floors(ModelConfig.from_dicts(SHAPES[model], {}), limits or Limits())


def test_a_dense_step_reads_every_weight_and_the_cache() -> None:
    # 440.4 M in the layers, 155.6 M in the tied embeddings; 114,688 bytes of keys and values a token
    weights = 2 * (440_401_920 + 155_582_464)
    assert floors("qwen3-0.6b").decode_bytes(8, 8 * 1024) == weights + 8 * 1024 * 114_688


def test_a_step_of_experts_reads_those_that_its_tokens_reach() -> None:
    moe = floors("qwen3-30b-a3b")
    assert moe.distinct_experts(1) == 8
    assert moe.distinct_experts(8) == pytest.approx(51.6, abs=0.1)
    assert moe.distinct_experts(256) == pytest.approx(128, abs=0.1)
    expert, others = 48 * 3 * 2048 * 768, 48 * (2 * (32 + 4) * 128 * 2048 + 128 * 2048) + 151_936 * 2048
    assert moe.decode_bytes(1, 1024) == 2 * (others + 8 * expert) + 1024 * 98_304
    # All experts, with the input embeddings that a step does not read: the 30.5 billion of the name.
    assert others + 128 * expert + 151_936 * 2048 == pytest.approx(30.5e9, rel=0.01)


def test_many_rows_are_bound_by_products() -> None:
    slow = Limits(bytes_per_s=4.58e12, flop_per_s=1e12)
    assert floors("qwen3-14b", slow).decode_s(256, 0) == pytest.approx(256 * 2 * 13.99e9 / 1e12, rel=0.01)
    assert floors("qwen3-14b").decode_s(1, 0) == pytest.approx(2 * 13.99e9 / 4.58e12, rel=0.01)


def test_committed_floors_are_those_of_the_command() -> None:
    known = json.loads(PEERS.read_text())
    committed = {name: value for entry in known["floors"] for name, value in entry["figures"].items()}
    computed: dict[str, float] = {}
    for model, prefix in (("qwen3-0.6b", "q06"), ("qwen3-14b", "q14"), ("qwen3-30b-a3b", "q30")):
        computed |= floors(model).figures(prefix)
    assert committed == computed
