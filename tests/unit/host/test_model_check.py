"""What a start refuses before tritonserver is started, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import model_check
from minisgl_backend.host.model_check import check_folder, check_repository, may_lack_gpu
from minisgl_backend.host.repository import render_repository
from minisgl_backend.installation import model_repository
from minisgl_backend.weights.names import TensorNames
from minisgl_backend.weights.sizes import weight_bytes
from tests.parity.vision_checkpoints import save as save_seeing

ROOT = Path(__file__).resolve().parents[3]
DEMO = model_repository() / "engine" / "demo_model"
GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_check, "has_gpu", lambda: False)
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def refusal(folder: Path, free: int = 100 * GIB, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_folder(EngineConfig(model=str(folder), **options), lambda: free)  # type: ignore[arg-type]
    return str(caught.value)


def make_large(folder: Path, gib: int) -> None:
    """Weights of that size, in a file that takes no room."""
    size = gib * GIB
    tensor = {"dtype": "BF16", "shape": [size // 8192, 4096], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def test_the_demo_model_is_served(folder: Path) -> None:
    check_folder(EngineConfig(model=str(folder)))
    check_repository(model_repository())


def test_a_model_without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "which has no tokenizer; allowed: a folder with one of tokenizer.json, tokenizer.model" in refusal(folder)


def test_files_that_are_cut_off(folder: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-100])
        assert refusal(folder).startswith(f"{folder / name} cannot be read")
        (folder / name).write_bytes(whole)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x10\0\0\0\0\0\0\0{"])
def test_what_is_no_safetensors_file(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors cannot be read" in refusal(folder)


def test_options_that_do_not_fit_the_model(folder: Path) -> None:
    assert refusal(folder, tp=3) == "tp is 3; allowed: a divisor of the model's num_attention_heads, which is 8"
    assert "max_seq_len_override is 9999" in refusal(folder, max_seq_len_override=9999)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    assert "FooForCausalLM" in refusal(folder)


def test_a_model_that_is_larger_than_what_is_free(folder: Path) -> None:
    make_large(folder, 7)
    said = f"model is '{folder}', whose weights need 7.0 GiB of memory; 3.0 GiB are free"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    assert said in refusal(folder, 3 * GIB)
    assert "need 14.0 GiB" in refusal(folder, 13 * GIB, dtype="float32")
    assert "need 14.0 GiB" in refusal(folder, 13 * GIB, dp=2)
    check_folder(EngineConfig(model=str(folder)), lambda: 8 * GIB)
    assert weight_bytes(folder, TensorNames(), 4) == 2 * weight_bytes(folder, TensorNames()) == 14 * GIB


def test_it_needs_no_torch(folder: Path, tmp_path: Path) -> None:
    """A process under a limit of its own: refused with both figures, in far less than what importing torch takes."""
    make_large(folder, 7)
    repository = tmp_path / "repository"
    repository.mkdir()
    render_repository(model_repository(), repository, {"model": str(folder), "dtype": "bfloat16"})
    code = f"""
import resource, sys
from pathlib import Path
from typing import Any
from minisgl_backend.errors import ConfigError
from minisgl_backend.host import model_check
model_check.has_gpu = lambda: False
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    model_check.check_repository(Path({str(repository)!r}))
except ConfigError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "need 7.0 GiB of memory; 3.0 GiB are free" in done.stdout
    assert done.stdout.endswith("False\n")


def test_kernels_that_are_asked_for_by_name_may_lack_a_gpu(folder: Path, tmp_path: Path) -> None:
    for backend, expected in (("fa", True), ("triton,torch", True), ("torch", False), ("auto", False)):
        repository = tmp_path / backend
        repository.mkdir()
        render_repository(model_repository(), repository, {"attention_backend": backend})
        assert may_lack_gpu(repository) == expected


def test_an_encoder_without_weights(folder: Path, tmp_path: Path) -> None:
    """As in a folder of a model that was tuned on texts."""
    sees = tmp_path / "sees"
    save_seeing("qwen3_vl", sees)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, sees)
    options: Any = {"encoder_cache_mib": 1, "max_seq_len_override": 64}
    check_folder(EngineConfig(model=str(sees), **options))
    tensors = load_file(sees / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if "visual" not in name}, sees / "model.safetensors")
    assert "has no weights of the image encoder" in refusal(sees, **options)
    check_folder(EngineConfig(model=str(sees), **{**options, "encoder_cache_mib": 0}))
