"""GGUF files: configuration and every number as transformers reads them, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from minisgl_backend.errors import ConfigError
from minisgl_backend.models import gguf_folder
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir, fingerprint
from minisgl_backend.models.pooling import EmbeddingDefaults
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.gguf_files import GGUFSlice
from minisgl_backend.weights.gguf_header import NUMBER_TYPES
from minisgl_backend.weights.gguf_index import IndexedTensor, name_of
from minisgl_backend.weights.sizes import weight_bytes
from tests.tiny_gguf import HIDDEN, LAYERS, VOCAB, write

# Or those that it takes from its classes, where llama.cpp takes the size of a head.
UNREAD = {"architectures", "dtype", "torch_dtype", "rope_theta", "query_pre_attn_scalar"}


@pytest.fixture(autouse=True)
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Folders whose tokenizer was converted, which takes seconds."""
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(gguf_folder, "_convert_tokenizer", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.mark.parametrize("arch", sorted(LAYERS))
def test_it_is_what_transformers_reads(arch: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", arch)
    folder = find_model_dir(str(file))
    config = ModelConfig.load(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, dtype=torch.float32
    )
    expected = {name.replace("language_model.", ""): tensor for name, tensor in _checkpoint(model).items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    found = Checkpoint(folder, config.tensor_names)
    assert found.names() == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found.tensor(name), tensor), name
    theirs, ours = model.config, json.loads((folder / "config.json").read_text())
    for key in ours.keys() & theirs.to_dict().keys() - UNREAD:
        assert ours[key] == getattr(theirs, key) or (arch, key) == ("phi3", "sliding_window"), key
    assert config.eos_token_ids == (3, VOCAB - 1)
    assert weight_bytes(folder, config.tensor_names, 2) == sum(2 * tensor.numel() for tensor in expected.values())


def _checkpoint(model: Any) -> dict[str, torch.Tensor]:
    """Its tensors by their names in checkpoints: experts, which it has in one, each by itself."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for kind, part in zip(("gate", "up"), both.chunk(2), strict=True):
                    tensors[name.replace("gate_up_proj", f"{expert}.{kind}_proj.weight")] = part
        elif name.endswith("experts.down_proj"):
            tensors |= {name.replace("down_proj", f"{i}.down_proj.weight"): one for i, one in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"])
def test_parts_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", "llama")))
    checkpoint = Checkpoint(folder)
    stored = f"model.layers.1.{name}.weight"
    whole = checkpoint.tensor(stored)
    with checkpoint.open(stored) as part:
        for index in ((slice(0, 32), slice(None)), (slice(32, 64), slice(8, 40)), (3,), slice(5, 9), (0, slice(2, 4))):
            assert torch.equal(part[index], whole[index]), index


def test_a_split_file_is_one_model(tmp_path: Path, conversions: list[Path]) -> None:
    whole = find_model_dir(str(write(tmp_path / "whole.gguf", "llama")))
    write(tmp_path / "model.gguf", "llama", split=True)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3
    folders = {find_model_dir(str(part)) for part in parts}
    assert len(folders) == 1
    assert len(conversions) == 2
    folder = folders.pop()
    one, other = Checkpoint(whole), Checkpoint(folder)
    assert one.names() == other.names()
    assert all(torch.equal(one.tensor(name), other.tensor(name)) for name in one.names())
    assert fingerprint(folder).keys() == {"config.json", *(part.name for part in parts)}
    parts[1].unlink()
    with pytest.raises(ConfigError, match=rf"is one of 3 files, of which {parts[1].name} is not there"):
        find_model_dir(str(parts[0]))


def test_a_file_that_changed_is_converted_again(tmp_path: Path, conversions: list[Path]) -> None:
    file = write(tmp_path / "model.gguf", "llama")
    first = find_model_dir(str(file))
    assert find_model_dir(str(file)) == first
    write(file, "qwen3")
    assert ModelConfig.load(find_model_dir(str(file))).architecture == "Qwen3ForCausalLM"
    assert len(conversions) == 2
    with pytest.raises(ConfigError, match="has another size than when it was first read"):
        Checkpoint(first)


def llama3_factors(writer: gguf.GGUFWriter) -> None:
    turns = 8192 / (2 * np.pi * 50000.0 ** (np.arange(0, 32, 2) / 32))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32))


def other_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 16, dtype=np.float32))


def long_factors(writer: gguf.GGUFWriter) -> None:
    for name in ("short", "long"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.full(16, 2, np.float32))


@pytest.mark.parametrize(
    ("arch", "more", "change", "kind", "factor"),
    [
        ("llama", {}, llama3_factors, "llama3", 8),
        ("qwen3", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, None, "yarn", 4),
        ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, None, "linear", 2),
        ("phi3", {"rope__scaling__original_context_length": 64}, long_factors, "longrope", 2),
    ],
)
def test_ropes_that_transformers_does_not_read(
    arch: str, more: dict[str, Any], change: Any, kind: str, factor: float, tmp_path: Path
) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", arch, change=change, **more)))
    rope = ModelConfig.load(folder).layers[0].mixer.rope
    assert rope is not None
    assert (rope.type, rope.factor) == (kind, pytest.approx(factor))


def more_tensors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


def of_type(kind: gguf.GGMLQuantizationType) -> Callable[[gguf.GGUFWriter], None]:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return lambda writer: writer.add_tensor("x", np.zeros((4, size), np.uint8), raw_dtype=kind)


def frequencies_of_rotation(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_rot_embd.weight", np.zeros(16, np.float32))


@pytest.mark.parametrize(
    ("arch", "more", "change", "said"),
    [
        ("llama", {"expert_count": 8}, None, "llama.expert_count is 8; allowed: 0 or absent"),
        ("llama", {"rope__dimension_count": 8}, None, r"llama.rope.dimension_count is 8; allowed: the size of a head"),
        ("qwen2", {"rope__scaling__type": "su"}, None, "qwen2.rope.scaling.type is 'su'; allowed: none, linear, yarn"),
        ("llama", {}, other_factors, "rope_freqs.weight has .*; allowed: the factors of Llama 3.1's scaling"),
        ("llama", {}, more_tensors, "has 1 tensors that LlamaForCausalLM does not have: blk.0.attn_sinks.weight"),
        ("llama", {}, of_type(gguf.GGMLQuantizationType.I8), "x has the quantization type I8; allowed: F32, F16, Q4_0"),
        ("qwen3", {}, of_type(gguf.GGMLQuantizationType.NVFP4), "x has the quantization type NVFP4; allowed: F32"),
        ("qwen3", {"rope__scaling__type": "linear"}, None, "'linear', but there is no qwen3.rope.scaling.factor"),
        ("qwen3", {}, other_factors, "has 1 tensors that Qwen3ForCausalLM does not have: rope_freqs.weight"),
        ("llama", {"rope__scale_linear": 4.0}, llama3_factors, "rope.scale_linear is 4.0; allowed: 1.0, or absent"),
    ],
)
def test_what_is_not_served(arch: str, more: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", arch, change=change, **more)
    with pytest.raises(ConfigError, match=said) as caught:
        find_model_dir(str(file))
    assert str(caught.value).startswith(str(file))


def test_frequencies_that_llama_cpp_skips_are_skipped(tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", "llama", change=frequencies_of_rotation)))
    assert not any("rot" in name for name in Checkpoint(folder).names())


def test_files_joined_by_cat_are_told(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "llama", split=True)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    with pytest.raises(ConfigError, match=r"joined.gguf .* bytes another one begins; parts joined by cat are no model"):
        find_model_dir(str(joined))
    shutil.copy(parts[0], joined)
    with pytest.raises(ConfigError, match=r"split.count is 3, .* names that end in -00001-of-00003.gguf; parts joined"):
        find_model_dir(str(joined))


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache links snapshots/.../model.gguf to blobs/<digest>."""
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "model.gguf", "llama", split=True)
    for number, part in enumerate(sorted(tmp_path.glob("model-*.gguf"))):
        part.rename(tmp_path / f"blobs/{number}")
        part.symlink_to(tmp_path / f"blobs/{number}")
    folder = find_model_dir(str(tmp_path / "model-00002-of-00003.gguf"))
    assert folder.name == name_of(folder) == "model"
    assert Checkpoint(folder).names()


def test_a_served_name_is_the_files(tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "Tiny-1B.Q8_0.gguf", "llama")))
    assert name_of(folder) == "Tiny-1B.Q8_0"
    assert name_of(tmp_path) == str(tmp_path)
    snapshot = tmp_path / "models--Owner--A-name" / "snapshots" / ("0123456789" * 4)
    assert name_of(snapshot) == "Owner/A-name"


def test_a_folder_with_one_model_stands_for_it(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "llama", split=True)
    (tmp_path / "model.gguf").unlink(missing_ok=True)
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    assert name_of(find_model_dir(str(tmp_path))) == "model"
    write(tmp_path / "another.gguf", "llama")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_model_dir(str(tmp_path))


def test_a_generation_config_beside_the_file_is_read(tmp_path: Path) -> None:
    def recommended(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 1.5)
        writer.add_float32("general.sampling.min_p", 0.25)

    file, beside = write(tmp_path / "model.gguf", "llama", change=recommended), tmp_path / "generation_config.json"
    own = ModelConfig.load(find_model_dir(str(file)))
    assert (own.generation.temperature, own.generation.min_p, own.generation.top_p) == (1.5, 0.25, None)
    beside.write_text('{"do_sample": true, "temperature": 0.5, "top_p": 0.75, "eos_token_id": [7, 8]}')
    found = ModelConfig.load(find_model_dir(str(file)))
    assert (found.generation.temperature, found.generation.min_p, found.generation.top_p) == (0.5, 0.25, 0.75)
    assert set(found.eos_token_ids) == {*own.eos_token_ids, 7, 8}
    beside.write_text('{"do_sample": false}')
    assert ModelConfig.load(find_model_dir(str(file))).generation.temperature == 0
    beside.write_text('{"eos_token_id": "end"}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id is \"end\""):
        find_model_dir(str(file))
    beside.write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read as JSON"):
        find_model_dir(str(file))
    beside.unlink()
    assert ModelConfig.load(find_model_dir(str(file))) == own


def biases(writer: gguf.GGUFWriter) -> None:
    sizes = {"q": 128, "k": 64, "v": 64, "output": HIDDEN}
    for name in [f"blk.{layer}.attn_{kind}" for layer in range(2) for kind in sizes]:
        size = sizes[name.rpartition("_")[2]]
        writer.add_tensor(f"{name}.bias", np.arange(size, dtype=np.float32))


def test_biases_of_llama_are_in_the_order_of_its_rows(tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", "llama", change=biases)))
    found = Checkpoint(folder).tensor("model.layers.0.self_attn.q_proj.bias")
    assert found[:32].tolist() == [*range(0, 32, 2), *range(1, 32, 2)]
    with Checkpoint(folder).open("model.layers.0.self_attn.q_proj.bias") as part:
        assert torch.equal(part[slice(8, 40)], found[8:40])
    assert json.loads((folder / "config.json").read_text())["attention_bias"] is True


def test_an_embedding_model_pools_as_its_file_says(tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", "qwen3", pooling_type=1)))
    found = EmbeddingDefaults.load(folder)
    assert (found.kind, found.normalize, found.is_embedding_model) == ("mean", True, True)
    plain = find_model_dir(str(write(tmp_path / "plain.gguf", "qwen3", pooling_type=0)))
    assert not EmbeddingDefaults.load(plain).is_embedding_model


def test_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(file := tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ConfigError, match=r"general.architecture is 'mamba'; allowed: gemma2, gemma3, lfm2, lfm2moe, llama, phi3"
    ):
        find_model_dir(str(file))


def test_files_that_are_damaged_or_cut_off(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model.gguf cannot be read as a GGUF file: it has \d+ bytes of \d+"):
        find_model_dir(str(file))
    random = np.random.default_rng(0)
    damaged = [b"", b"GGUF", whole[:200], whole[:700], b"GGML" + whole[4:], whole[:4] + b"\xff" * 20 + whole[24:]]
    for place in random.integers(8, 900, 40):
        damaged.append(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
    for content in damaged:
        file.write_bytes(content)
        try:
            find_model_dir(str(file))
        except ConfigError as error:
            assert "\n" not in str(error)  # noqa: PT017  (some changes hit what nobody reads)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "model.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(gguf_folder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="read by the package gguf, which is not installed; pip install"):
        find_model_dir(str(file))


def test_number_types_are_those_of_the_package() -> None:
    stored = np.random.default_rng(0).integers(0, 256, 2**16, np.uint8)
    for number, kind in NUMBER_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (known.name, *gguf.GGML_QUANT_SIZES[known]) == (kind.name, kind.size, kind.nbytes)
        tensor = IndexedTensor(name="x", file=0, type=kind.name, shape=(4, 2 * kind.size), offset=0)
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(stored[: 8 * kind.nbytes].reshape(4, -1), known)
            found = GGUFSlice(stored, tensor, None)[()].numpy()
        np.testing.assert_array_equal(found, expected)
