"""gpt-oss with experts in MXFP4, as it is published, in float32 against transformers with the dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.moe.mxfp4.weight import dequantize
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.experts.method import ExpertsSpec
from minisgl_backend.weights.experts.mxfp4 import Mxfp4ExpertsMethod, whole_blocks
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.parity.quantized import write_mxfp4
from tests.parity.test_fp8_weights import tokens
from tests.unit.layers.ranks import on_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With MXFP4 experts, and the same weights without."""
    source, quantized, plain = (tmp_path_factory.mktemp(kind) for kind in ("source", "quantized", "plain"))
    save_checkpoint("gpt_oss", source)
    write_mxfp4(source, quantized, plain)
    return quantized, plain


def test_logits(folders: tuple[Path, Path]) -> None:
    """Of a prompt in chunks and of decoded tokens; and of two ranks, of which one has a block and the other two."""
    quantized, plain = folders
    reference, prompt = reference_model(plain), tokens(40, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([[*prompt, 7, 9]])).logits[0].float()

    def work(tp: TensorParallel) -> tuple[torch.Tensor, list[int]]:
        paged = PagedModel(quantized, page_size=16, tp=tp)
        experts = [one for one in paged.model.modules() if isinstance(one, Mxfp4ExpertsMethod)]
        assert len(experts) == 3
        found = [paged.step({0: prompt[:33]}, {})[0], paged.step({0: prompt[33:]}, {})[0]]
        return torch.cat([*found, *(paged.step({}, {0: token})[0] for token in (7, 9))]), [experts[0].spec.local]

    ranks = [work(TensorParallel.single()), *on_ranks(2, work)]
    assert [local for _, local in ranks] == [[96], [32], [64]]
    for logits, _ in ranks:
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_numbers_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    quantized, plain = (load_file(folder / "model.safetensors") for folder in folders)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    found = dequantize(quantized[f"{name}_blocks"], quantized[f"{name}_scales"], torch.float32)
    assert torch.equal(found.transpose(1, 2), plain[name])
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    assert len(dequantize(blocks, torch.full((1, 16), 127, dtype=torch.uint8), torch.float32).unique()) == 15


@pytest.mark.parametrize(("size", "ranks"), [(2880, 2), (2880, 4), (2880, 8), (96, 2)])
def test_slices_are_whole_blocks_and_all_of_them(size: int, ranks: int) -> None:
    local, specs = size // ranks, []
    for rank in range(ranks):
        specs.append(whole_blocks(spec(size, rank * local, local)))
    assert specs[0].start == 0
    assert [one.start + one.local for one in specs] == [*(one.start for one in specs[1:]), size]
    assert all(one.start % 32 == 0 and abs(one.local - local) < 32 for one in specs)


def spec(size: int, start: int, local: int) -> ExpertsSpec:
    return ExpertsSpec(
        name="experts", num_experts=2, experts_per_token=1, hidden_size=64, intermediate_size=size, start=start,
        local=local, activation="swiglu_oai", renormalize=True,
    )  # fmt: skip


def test_what_has_no_whole_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="intermediate_size is 100"):
        whole_blocks(spec(100, 0, 100))
    with pytest.raises(ConfigError, match="tp gives a rank 24"):
        whole_blocks(spec(96, 0, 24))


def test_other_layers_in_mxfp4_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="q_proj MXFP4; allowed: experts alone"):
        PagedModel(tmp_path, page_size=16)
