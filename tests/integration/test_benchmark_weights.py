"""What benchmarks.formats makes of random weights: experts drawn uniformly, and blocks like those of a GGUF file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drawn_experts import draw_uniformly, recorded
from benchmarks.driver import Driver
from benchmarks.floors import Floors
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES, make_folder
from benchmarks.random_blocks import add_blocks, file_bytes, qwen3_tensors
from minisgl_backend.models.config import ModelConfig

SMALL = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def folder_of(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    monkeypatch.setitem(SHAPES, "small", {**SHAPES[shape], **SMALL, **more})
    return make_folder("small", tmp_path)


def test_experts_are_drawn_uniformly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = folder_of("gpt-oss-20b-mxfp4", tmp_path, monkeypatch, layer_types=kinds)
    driver, seeds = Driver(folder, dtype="float32"), iter((1, 2))

    def distinct() -> dict[int, float]:
        rng = random.Random(next(seeds))
        with recorded([1, 8, 64]) as drawn:
            driver.submit([rng.randint(0, 1000) for _ in range(600)], 1)
            driver.run()
        return drawn.distinct

    config = ModelConfig.load(folder)
    uniform = {tokens: Floors(config, Limits()).distinct_experts(tokens) for tokens in (1, 8, 64)}
    assert distinct()[64] < 0.9 * uniform[64], "what makes draw_uniformly needed"
    draw_uniformly(driver.core._runner._model)  # type: ignore[attr-defined]
    found = distinct()
    driver.close()
    assert found == pytest.approx(uniform, rel=0.05)
    assert Floors(config, Limits(), drawn={8: 5.0}).distinct_experts(8) == 5.0


def test_blocks_are_read_like_those_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    folder = folder_of("qwen3-14b", tmp_path, monkeypatch, hidden_size=256, intermediate_size=512)
    config = SHAPES["small"]
    add_blocks(folder, config)
    shapes = qwen3_tensors(config)
    of_mlps = 4 * 3 * 256 * 512 * 144 // 256
    assert of_mlps < file_bytes(folder) < 3 * of_mlps
    driver = Driver(folder, dummy_weights=False)
    model = driver.core._runner._model  # type: ignore[attr-defined]
    driver.submit([1, 2, 3], 4)
    driver.run()
    head = model.lm_head.method.dequantized().float()
    driver.close()
    assert head.shape == shapes["lm_head.weight"]
    assert head.std().item() == pytest.approx(0.02, rel=1.5)
    assert abs(head.mean().item()) < 0.01
