"""What `minisgl check` says of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.image_calls import images_told
from minisgl_backend.images import front
from minisgl_backend.models.config import ModelConfig

LLAVA = Path(__file__).parents[2] / "released" / "configs" / "llava-hf--llava-1.5-7b-hf.json"
TEXT = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2}
GLM = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "text_config": {
        **TEXT,
        **{"intermediate_size": 13696, "vocab_size": 151552, "max_position_embeddings": 65536, "dtype": "bfloat16"},
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        "partial_rotary_factor": 0.5,
    },
    "vision_config": {"depth": 24},
}


@pytest.fixture(autouse=True)
def _shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "shared_bytes", lambda: 8 << 30)


def told(folder: Path, config: dict[str, Any], processor: dict[str, Any] | None = None, **options: Any) -> str | None:
    (folder / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return images_told(EngineConfig(model=str(folder), **options), ModelConfig.load(folder), folder)


def test_long_calls_are_told(tmp_path: Path) -> None:
    pixels = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
    long = told(tmp_path, GLM, pixels)
    assert long is not None
    assert long.endswith("ms on an H200, which streams wait for: max_image_tokens makes them shorter")
    assert told(tmp_path, GLM, pixels, max_image_tokens=1000) == (
        "of up to 968 tokens, encoded in calls of up to 21 ms on an H200"
    )


def test_too_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container of Docker has."""
    monkeypatch.setattr(front, "shared_bytes", lambda: 64 << 20)
    pixels = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
    assert "has 64 MiB for decoded images" in str(told(tmp_path, GLM, pixels))
    assert "image_cache_mib alone is 1024" in str(told(tmp_path, GLM, pixels))
    assert front._cache_bytes(1024) == 32 << 20
    assert "has 64 MiB" in str(told(tmp_path, GLM, pixels, image_cache_mib=0)), "an image may need more"
    monkeypatch.undo()


def test_tiles_and_refusals_are_told(tmp_path: Path) -> None:
    llava = json.loads(LLAVA.read_text(encoding="utf-8"))
    assert "preprocessor_config.json" in str(told(tmp_path, llava))
    square = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    assert told(tmp_path, llava, square) == "of up to 576 tokens, encoded in calls of up to 1 ms on an H200"
    assert told(tmp_path, llava, square, encoder_cache_mib=0) == "refused: encoder_cache_mib is 0"
    with pytest.raises(ConfigError, match="max_image_tokens is 100"):
        told(tmp_path, llava, square, max_image_tokens=100)
    llava["vision_config"]["model_type"] = "dinov2"
    assert "vision_config.model_type" in str(told(tmp_path, llava, square))


def test_families_that_see_elsewhere_are_refused_with_the_list(tmp_path: Path) -> None:
    text = {**TEXT, "intermediate_size": 64, "vocab_size": 100, "num_key_value_heads": 8, "dtype": "bfloat16"}
    text |= {
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
    }
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": text}
    said = str(told(tmp_path, {**config, "vision_config": {"hidden_size": 32}}, {}))
    assert said.startswith("refused: images are not served with model_type 'llama4' in config.json; allowed: gemma3,")
    assert said.endswith("smolvlm")


@pytest.mark.parametrize("name", ["InternVLChatModel", "LlavaLlamaForCausalLM"])
def test_formats_of_publishers_own_are_refused_with_the_name_of_the_other(name: str) -> None:
    with pytest.raises(ConfigError, match=r"in transformers' format, (InternVL|Llava)ForConditionalGeneration"):
        ModelConfig.from_dicts({"architectures": [name], "model_type": "x"}, {})
