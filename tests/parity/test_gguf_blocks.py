"""Models whose GGUF blocks are multiplied as they lie, against the same file as plain numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.number_formats import GGUF_BLOCKS
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.formats import QuantizationConfig
from minisgl_backend.weights.gguf import BlockLinearMethod
from minisgl_backend.weights.schemes.gguf import with_blocks
from minisgl_backend.weights.sizes import weight_bytes
from tests.parity.paged import PagedModel
from tests.tiny_gguf import VOCAB, sizes, write

CPU = torch.device("cpu")
TOKENS = [random.Random(number).randrange(VOCAB) for number in range(70)]
pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no compiled kernels here")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def kind_of(kind: str, name: str) -> str:
    if "gate_inp" in name:
        return "F32"
    if kind == "mixed":  # q, k and v, and gate and up, each in another type
        kinds = ["Q4_K", "Q6_K", "Q8_0", "Q4_1", "F16", "Q3_K"]
        return "Q8_0" if "attn_output" in name else kinds[sum(map(ord, name)) % len(kinds)]
    return "Q8_0" if kind.endswith("K") and "attn_output" in name else kind  # whose rows are too short


def logits_of(paged: PagedModel) -> torch.Tensor:
    return torch.cat([paged.step({0: TOKENS[:50]}, {})[0], paged.step({0: TOKENS[50:]}, {})[0]]).float()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "phi3", "qwen2", "qwen3moe"])
@pytest.mark.parametrize("kind", [*GGUF_BLOCKS, "mixed"])
def test_logits(kind: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if arch != "llama" and kind not in ("Q4_0", "Q4_K", "mixed"):
        pytest.skip("kernels do not see the architecture")
    # All experts: else close ones may be picked in one and not in the other.
    more = {"expert_used_count": 4} if arch == "qwen3moe" else {}
    file = write(tmp_path / "model.gguf", arch, kinds=lambda name: kind_of(kind, name), wide=True, **more)
    folder = find_model_dir(str(file))
    config = ModelConfig.load(folder)
    kept = PagedModel(folder, page_size=16, dtype=torch.bfloat16)
    assert any(isinstance(one, BlockLinearMethod) for one in kept.model.modules())
    found = logits_of(kept)
    exact = logits_of(PagedModel(folder, page_size=16, dtype=torch.float32))
    assert (found - exact).std() <= 5e-2 * exact.std(), "bfloat16 and activations in int8"
    alone = kept.step({1: TOKENS[:30]}, {})[1]
    assert torch.equal(kept.step({2: TOKENS[:30], 3: TOKENS[:9]}, {0: 5})[2], alone), "in a batch as alone"
    chunks = [kept.step({4: TOKENS[start : start + 10]}, {})[4] for start in range(0, 30, 10)]
    difference = torch.cat(chunks).float() - alone.float()
    assert difference.std() <= 5e-2 * alone.float().std(), "in chunks, whose attention is torch's, as whole"
    formats = with_blocks(config.quantization, folder)
    expected = sum(one.nbytes for one in kept.model.parameters())  # norms may be in float32
    told = weight_bytes(folder, config.tensor_names, 2, quantization=formats)
    assert 0.98 * expected < told <= expected, "what check tells"


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K"])
def test_ranks_have_their_part(arch: str, kind: str, tmp_path: Path) -> None:
    """What would cut blocks is in bfloat16."""
    folder = find_model_dir(str(write(tmp_path / "m.gguf", arch, kinds=lambda name: kind_of(kind, name), wide=True)))

    def weights(rank: int, size: int, **more: Any) -> dict[str, tuple[torch.Tensor, bool]]:
        tp = TensorParallel(rank, size, None, CPU)
        load = LoadConfig(dtype=torch.bfloat16, device=CPU, max_seq_len=64, tp=tp, **more)
        model: nn.Module = build_model(ModelConfig.load(folder), folder, load)
        found = {}
        for name, module in model.named_modules():
            if name.endswith(".method"):
                method: Any = module
                kept = isinstance(module, BlockLinearMethod) and all(one.type for one in module.pieces())
                found[name] = method.dequantized(), kept
        return found

    for rank in range(2):
        found, expected = weights(rank, 2), weights(rank, 2, ops=TorchOps())
        for name, (numbers, kept) in found.items():
            if name in expected:
                assert torch.equal(numbers, expected[name][0]), name
            assert kept != (kind == "Q4_K" and "down_proj" in name), name


def test_rows_are_mapped(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "qwen2", kinds=lambda _: "Q8_0")
    model = PagedModel(find_model_dir(str(file)), page_size=16, dtype=torch.bfloat16).model
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line]
    spans = [tuple(int(one, 16) for one in fields[0].split("-")) for fields in maps]
    for module in model.modules():
        if isinstance(module, BlockLinearMethod):
            for piece in module.operand.pieces:
                assert any(start <= piece.data.data_ptr() < stop for start, stop in spans)
    assert np.prod(model.lm_head.method.operand.shape) == VOCAB * sizes("qwen2")["hidden"]


def test_where_it_is_not_served(tmp_path: Path) -> None:
    folder = find_model_dir(str(write(tmp_path / "model.gguf", "qwen2", kinds=lambda _: "F16")))
    assert with_blocks(QuantizationConfig(), folder) == QuantizationConfig(), "no blocks"
    folder = find_model_dir(str(write(tmp_path / "other.gguf", "qwen2")))
    asked = QuantizationConfig().with_option("fp8")
    assert with_blocks(asked, folder) is asked, "an option asks for another format"
    said = str(with_blocks(QuantizationConfig(), folder).schemes[0])
    assert said == "GGUF's blocks as they lie in the file (Q8_0)"
