"""The shapes that benchmarks make up are served, scaled down, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.driver import Driver
from benchmarks.model_shapes import SHAPES, make_folder
from minisgl_backend.layers.config import MoeConfig
from minisgl_backend.models.config import ModelConfig

SMALL = {"num_hidden_layers": 2, "vocab_size": 1024, "hidden_size": 256}


def test_the_moe_shape_is_read_as_its_authors_mean_it() -> None:
    config = ModelConfig.from_dicts(SHAPES["qwen3-30b-a3b"], {})
    (layer,) = set(config.layers)
    moe, attention = layer.mlp, layer.mixer
    assert isinstance(moe, MoeConfig)
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (128, 8, 768)
    assert moe.router.renormalize
    assert (config.num_layers, attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (48, 32, 4, 128)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("qwen3-30b-a3b", False),
        ("qwen3-30b-a3b", True),
        ("qwen3-14b-fp8", True),
        ("qwen3-14b-awq", True),
        pytest.param("qwen3-14b-gptq", True, marks=pytest.mark.full),
    ],
)
def test_small_shapes_answer(name: str, weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of their own making and with saved ones, in each format that random checkpoints are written in."""
    small = {**SHAPES[name], **SMALL, "intermediate_size": 512}
    if "num_experts" in small:
        small["num_experts"] = 16
    monkeypatch.setitem(SHAPES, "small", small)
    folder = make_folder("small", tmp_path, weights=weights)
    driver = Driver(folder, num_pages=64, max_running_requests=4, dummy_weights=not weights)
    try:
        for index in range(3):
            driver.submit([index] * (20 + index), 5, 0.6 if index else 0.0)
        driver.run()
        assert [(len(line.tokens), line.done) for line in driver.timelines.values()] == [(5, True)] * 3
    finally:
        driver.close()
