"""GGUF files: configuration and every number as transformers reads them, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
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
from minisgl_backend.weights.files import Checkpoint
from minisgl_backend.weights.gguf_header import NUMBER_TYPES
from minisgl_backend.weights.sizes import weight_bytes

HIDDEN, EXPERTS, VOCAB = 64, 4, 40
ATTENTION = {"attn_q.weight": "q hidden", "attn_k.weight": "kv hidden", "attn_v.weight": "kv hidden"}
DENSE = {
    **ATTENTION,
    "ffn_gate.weight": "inner hidden",
    "ffn_up.weight": "inner hidden",
    "ffn_down.weight": "hidden inner",
}
HEAD_NORMS = {"attn_q_norm.weight": "head", "attn_k_norm.weight": "head"}
BIASES = {"attn_q.bias": "q", "attn_k.bias": "kv", "attn_v.bias": "kv"}
BOTH_NORMS = {"post_attention_norm.weight": "hidden", "post_ffw_norm.weight": "hidden"}
MIXTURE = {
    **ATTENTION, "ffn_gate_inp.weight": "experts hidden", "ffn_gate_exps.weight": "experts expert hidden",
    "ffn_up_exps.weight": "experts expert hidden", "ffn_down_exps.weight": "experts hidden expert",
}  # fmt: skip
SHARED = {
    "ffn_gate_inp_shexp.weight": "hidden", "ffn_gate_shexp.weight": "shared hidden",
    "ffn_up_shexp.weight": "shared hidden", "ffn_down_shexp.weight": "hidden shared",
}  # fmt: skip
MERGED = {"attn_qkv.weight": "qkv hidden", "ffn_up.weight": "two hidden", "ffn_down.weight": "hidden inner"}
LAYERS: Mapping[str, Mapping[str, str]] = {
    "gemma2": {**DENSE, **BOTH_NORMS},
    "gemma3": {**DENSE, **HEAD_NORMS, **BOTH_NORMS},
    "llama": DENSE,
    "phi3": MERGED,
    "qwen2": {**DENSE, **BIASES},
    "qwen2moe": {**MIXTURE, **SHARED, **BIASES},
    "qwen3": {**DENSE, **HEAD_NORMS},
    "qwen3moe": {**MIXTURE, **HEAD_NORMS},
}
# Sizes that transformers does not read: those of its classes' defaults.
HEAD = {"qwen3": 128}
UNREAD = {"architectures", "dtype", "torch_dtype", "rope_theta"}
EXPERT = {"qwen2moe": 1408, "qwen3moe": 768}
SHARED_EXPERT = 5632


def sizes(arch: str) -> dict[str, int]:
    head = HEAD.get(arch, 32)
    heads = HIDDEN // head if arch in ("phi3", "qwen2", "qwen2moe") else 4
    q, kv = heads * head, heads // 2 * head
    return {
        "hidden": HIDDEN, "head": head, "heads": heads, "kv_heads": heads // 2, "q": q, "kv": kv, "qkv": q + 2 * kv,
        "inner": 96, "two": 192, "experts": EXPERTS, "expert": EXPERT.get(arch, 0), "shared": SHARED_EXPERT,
        "vocab": VOCAB,
    }  # fmt: skip


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


def write(
    path: Path, arch: str, *, change: Callable[[gguf.GGUFWriter], None] | None = None, split: bool = False, **more: Any
) -> Path:
    """A model of two layers with random weights, in Q8_0 where rows allow it; `more`: values behind the name."""
    size = sizes(arch)
    values = {
        "context_length": 128, "block_count": 2, "embedding_length": HIDDEN, "feed_forward_length": size["inner"],
        "attention.head_count": size["heads"], "attention.head_count_kv": size["kv_heads"],
        "attention.key_length": size["head"], "attention.sliding_window": 64, "rope.dimension_count": size["head"],
    }  # fmt: skip
    if arch in EXPERT:
        values |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT[arch]}
        values["expert_shared_feed_forward_length"] = SHARED_EXPERT
    values |= {key.replace("__", "."): value for key, value in more.items()}
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=10 if split else 0)
    for key, value in values.items():
        if isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_float32)(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 50000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB - 1)] + ["<|im_end|>"])
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_pad_token_id(0)
    random = np.random.default_rng(0)
    if change is not None:
        change(writer)
    for name, shape in _shapes(arch).items():
        numbers = random.standard_normal(shape, np.float32)
        if len(shape) > 1 and "gate_inp" not in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(arch: str) -> dict[str, tuple[int, ...]]:
    size = sizes(arch)
    layer = {
        "attn_norm.weight": "hidden", "ffn_norm.weight": "hidden", "attn_output.weight": "hidden q", **LAYERS[arch],
    }  # fmt: skip
    names = {"token_embd.weight": "vocab hidden", "output_norm.weight": "hidden"}
    names |= {f"blk.{number}.{name}": shape for number in range(2) for name, shape in layer.items()}
    names |= {} if arch.startswith("gemma") else {"output.weight": "vocab hidden"}
    return {name: tuple(size[one] for one in shape.split()) for name, shape in names.items()}


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
    rope = ModelConfig.load(folder).layers[0].attention.rope
    assert rope is not None
    assert (rope.type, rope.factor) == (kind, pytest.approx(factor))


def more_tensors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


def other_type(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("x", np.zeros((4, 4), np.int8))


@pytest.mark.parametrize(
    ("arch", "more", "change", "said"),
    [
        ("llama", {"expert_count": 8}, None, "llama.expert_count is 8; allowed: 0 or absent"),
        ("llama", {"rope__dimension_count": 8}, None, r"llama.rope.dimension_count is 8; allowed: the size of a head"),
        ("qwen2", {"rope__scaling__type": "su"}, None, "qwen2.rope.scaling.type is 'su'; allowed: none, linear, yarn"),
        ("llama", {}, other_factors, "rope_freqs.weight has .*; allowed: the factors of Llama 3.1's scaling"),
        ("llama", {}, more_tensors, "has 1 tensors that LlamaForCausalLM does not have: blk.0.attn_sinks.weight"),
        ("llama", {}, other_type, "x has the quantization type 24; allowed: F32, F16, Q4_0"),
    ],
)
def test_what_is_not_served(arch: str, more: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", arch, change=change, **more)
    with pytest.raises(ConfigError, match=said) as caught:
        find_model_dir(str(file))
    assert str(caught.value).startswith(str(file))


def test_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(file := tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general.architecture is 'mamba'; allowed: gemma2, gemma3, llama, phi3"):
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
    for number, kind in NUMBER_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (known.name, *gguf.GGML_QUANT_SIZES[known]) == (kind.name, kind.size, kind.nbytes)
