"""What GPUs hold of a GGUF file, made on a CPU: the file's numbers, in blocks where the GPU's kernels have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="pip install gguf")

from minisgl_backend.kernels.linear.gguf.packed import PACKED, PackedBlocks
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.gguf import GGUFFactory
from minisgl_backend.weights.gguf_packed import PackedLinearMethod
from minisgl_backend.weights.method import LinearSpec
from tests.tiny_gguf import write

CPU = torch.device("cpu")
MIXED = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q4_1", "ffn_gate": "Q6_K", "ffn_up": "Q4_0"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def methods(folder: Path, tp: int = 1, rank: int = 0, **more: Any) -> dict[str, Any]:
    load = LoadConfig(
        dtype=torch.bfloat16, device=CPU, max_seq_len=64, tp=TensorParallel(rank, tp, None, CPU), **more
    )  # fmt: skip
    model = build_model(ModelConfig.load(folder), folder, load)
    return {name: module for name, module in model.named_modules() if name.endswith(".method")}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its methods, whose kernels are not called."""

    def linear(factory: GGUFFactory, spec: LinearSpec) -> PackedLinearMethod:
        kernels: Any = SimpleNamespace(linear=None, direct=None, prepare=None)
        return PackedLinearMethod(spec, kernels, factory.dtype, factory.device)

    monkeypatch.setattr(GGUFFactory, "linear", linear)
    monkeypatch.setattr("minisgl_backend.models.build.block_types", lambda *_: PACKED)


def is_packed(method: Any) -> bool:
    return all(isinstance(piece, PackedBlocks) for piece in method.operand.pieces)


@pytest.mark.parametrize(("kind", "arch"), [("Q4_0", "qwen2"), ("Q8_0", "phi3"), ("Q4_K", "phi3"), ("mixed", "qwen2")])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpu_has_the_files_numbers(kind: str, arch: str, tmp_path: Path) -> None:
    """Of one rank and of two; what tp would cut is in bfloat16."""

    def kind_of(name: str) -> str:
        if kind == "mixed":
            return next((found for part, found in MIXED.items() if part in name), "Q8_0")
        return "Q8_0" if kind == "Q4_K" and "attn_output" in name else kind  # whose rows are too short

    folder = find_model_dir(str(write(tmp_path / "model.gguf", arch, kinds=kind_of, wide=True)))
    for size, rank in ((1, 0), (2, 1)):
        found, expected = methods(folder, size, rank), methods(folder, size, rank, ops=TorchOps())
        assert any("qkv" in name for name in found)
        for name, method in found.items():
            if name in expected:
                exact = expected[name].dequantized().float()
                assert (method.dequantized().float() - exact).norm() <= 6e-3 * exact.norm(), name
            cut = size == 2 and "down_proj" in name and kind == "Q4_K"
            assert is_packed(method) != (cut or (kind == "mixed" and "qkv" in name)), name
            if kind in PACKED and not cut:
                assert len(method.operand.pieces) == 1, "outputs in one layout are one weight"
