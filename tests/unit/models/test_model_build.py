"""Weights get to their places exactly once, or the error names the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minisgl_backend.errors import ConfigError
from minisgl_backend.kv.layout import KVScales
from minisgl_backend.models.build import build_model, weight_parts
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.families import FAMILIES
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.weights.kv_scales import read_kv_scales
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.sizes import weight_bytes
from tests.parity.checkpoints import CHECKPOINTS, save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A folder with one shard, untied, that a test may damage."""
    save_checkpoint("qwen3-yarn", tmp_path)
    return tmp_path


def build(folder: Path, **options: Any) -> CausalLM:
    settings = {"dtype": torch.float32, "device": CPU, "max_seq_len": 64, **options}
    return build_model(ModelConfig.load(folder), folder, LoadConfig(**settings))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors of the only shard; `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    content = load_file(path)
    for name, tensor in tensors.items():
        content.pop(name.replace("__", "."), None)
        if tensor is not None:
            content[name.replace("__", ".")] = tensor
    save_file(content, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_element_of_every_parameter_has_one_source(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    model = build(tmp_path, dummy_weights=True)
    for parameter in model.parameters():
        parameter.data.zero_()
    for part in weight_parts(model):
        part.target.add_(1.0)
    assert all(bool((parameter == 1.0).all()) for parameter in model.parameters())


def test_weights_are_converted(qwen3: Path) -> None:
    model = build(qwen3, dtype=torch.bfloat16)
    expected = load_file(qwen3 / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(model.model.embed_tokens.weight, expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_progress_reaches_the_total(qwen3: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = build(qwen3, on_progress=lambda done, total: calls.append((done, total)))
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (size, size)


def test_a_missing_tensor_is_named(qwen3: Path) -> None:
    change(qwen3, model__layers__1__self_attn__q_norm__weight=None)
    with pytest.raises(ConfigError, match=r"lacks 1 .*model\.layers\.1\.self_attn\.q_norm\.weight"):
        build(qwen3)


@pytest.mark.parametrize("prefix", ["language_model.", "_orig_mod.", "module.", "base_model.model."])
def test_a_prefix_of_all_tensors_is_hinted_at(qwen3: Path, prefix: str) -> None:
    path = qwen3 / "model.safetensors"
    content = load_file(path)
    save_file({prefix + name: tensor for name, tensor in content.items()}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks {len(content)} .*; it has {len(content)} of them under '{prefix}'"):
        build(qwen3)


def test_a_prefix_that_the_checkpoint_lacks_is_hinted_at(qwen3: Path) -> None:
    """As sentence-transformers saves a model, with another architecture."""
    path = qwen3 / "model.safetensors"
    content = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(content, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks .*; it has \d+ of them without 'model.' in front"):
        build(qwen3)


def test_an_unexpected_tensor_is_named(qwen3: Path) -> None:
    change(qwen3, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(ConfigError, match=r"has 1 .*model\.layers\.0\.self_attn\.q_proj\.bias"):
        build(qwen3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_integer_weights_are_refused(qwen3: Path, dtype: torch.dtype) -> None:
    name = "model__layers__0__mlp__down_proj__weight"
    weight = load_file(qwen3 / "model.safetensors")[name.replace("__", ".")]
    change(qwen3, **{name: (weight * 100).to(dtype)})
    words = f"layers.0.mlp.down_proj.weight has the number format {str(dtype).removeprefix('torch.')}"
    with pytest.raises(ConfigError, match=words):
        build(qwen3)


def test_a_wrong_shape_is_named(qwen3: Path) -> None:
    change(qwen3, model__norm__weight=torch.zeros(63))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(63,\)"):
        build(qwen3)


def test_a_tensor_in_two_files_is_named(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").rename(qwen3 / "part-1.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, qwen3 / "part-2.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is in two files"):
        build(qwen3)


def test_other_files_beside_a_whole_one_are_left_alone(qwen3: Path) -> None:
    save_file({"norm.weight": torch.zeros(64)}, qwen3 / "consolidated.safetensors")
    build(qwen3)


def test_a_damaged_file_is_named(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        build(qwen3)


def test_a_folder_without_weights(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no \\*\\.safetensors"):
        build(qwen3)


def test_an_index_that_names_missing_shards(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (qwen3 / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        build(qwen3)


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    save_checkpoint("qwen2-tied", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone(), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    model = build(tmp_path)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(model.logits(hidden), hidden @ model.model.embed_tokens.weight.t())
    assert "lm_head.weight" not in {part.name for part in weight_parts(model)}


def test_an_output_projection_of_its_own_counts_though_the_config_ties_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint("qwen2-tied", tmp_path)
    own = torch.randn(320, 64)
    change(tmp_path, lm_head__weight=own)
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(build(tmp_path).logits(hidden), hidden @ own.t())
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(reference.lm_head(hidden), hidden @ own.t())


def test_scales_of_an_fp8_cache(qwen3: Path) -> None:
    """All spellings, and 1 for layers that have none; without an FP8 cache nobody minds them."""
    assert read_kv_scales(3, qwen3, TensorNames()) == [KVScales()] * 3
    change(
        qwen3,
        model__layers__0__self_attn__k_scale=torch.tensor(0.5),
        model__layers__0__self_attn__v_scale=torch.tensor([0.25]),
        model__layers__2__self_attn__k_proj__k_scale=torch.tensor(2.0, dtype=torch.bfloat16),
        model__layers__2__self_attn__v_proj__output_scale=torch.tensor([4.0]),  # of older llm-compressor
    )
    assert read_kv_scales(3, qwen3, TensorNames()) == [KVScales(0.5, 0.25), KVScales(), KVScales(2.0, 4.0)]
    change(qwen3, model__layers__1__self_attn__kv_scale=torch.tensor(3.0))  # one for both
    assert read_kv_scales(3, qwen3, TensorNames())[1] == KVScales(3.0, 3.0)
    build(qwen3)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_scales_and_size_of_a_text_model_among_others(tmp_path: Path, prefix: str) -> None:
    """By the names of its family, and without the encoder and a tied output that are not loaded."""
    layer = f"{prefix}layers.1.self_attn"
    tensors = {
        f"{layer}.k_scale": torch.tensor(0.5),
        f"{prefix}embed_tokens.weight": torch.ones(320, 64),
        "language_model.lm_head.weight": torch.ones(320, 64),
        "model.vision_tower.patch.weight": torch.ones(1000),
        "multi_modal_projector.weight": torch.ones(1000),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    names = FAMILIES["Gemma3ForConditionalGeneration"].tensor_names
    assert read_kv_scales(2, tmp_path, names) == [KVScales(), KVScales(0.5, 1.0)]
    assert weight_bytes(tmp_path, names, tied=True) == 4 * (320 * 64 + 1)
    assert weight_bytes(tmp_path, names) == 4 * (2 * 320 * 64 + 1)


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2)])
def test_a_scale_that_is_none(qwen3: Path, scale: torch.Tensor) -> None:
    change(qwen3, model__layers__1__self_attn__v_scale=scale)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_scale.*one finite number above 0"):
        read_kv_scales(3, qwen3, TensorNames())


def test_weights_in_another_format_come_with_a_hint(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").rename(qwen3 / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*.safetensors files.*transformers converts \*.bin: AutoModel"):
        build(qwen3)


def test_dummy_weights_need_no_files_and_are_the_same_every_time(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").unlink()
    first, second = build(qwen3, dummy_weights=True), build(qwen3, dummy_weights=True)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
        assert bool(a.isfinite().all())


@pytest.mark.parametrize(("name", "quantization"), [("gpt_oss", None), ("qwen2-tied", "fp8")])
def test_dummy_biases_are_noise(name: str, quantization: str | None, tmp_path: Path) -> None:
    """The same number in all of them would soon be most of every hidden state: a router would choose the same experts
    for all tokens, and a benchmark would read few of them."""
    save_checkpoint(name, tmp_path)
    model = build(tmp_path, dummy_weights=True, quantization=quantization)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert len(biases) >= 2
    assert max(float(bias.abs().max()) for bias in biases) < 0.2
    assert min(float(bias.std()) for bias in biases) > 0
