"""The parity benchmark, in small shapes: what it measures is the engine, and what it would call a fault is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import parity
from benchmarks.logits_runner import LogitsRunner, schedule
from benchmarks.model_shapes import SHAPES
from benchmarks.parity_reference import Sequences, save_checkpoint, transformers_logits
from minisgl_backend.models.build import build_model, weight_parts
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.decoder import CausalLM
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.runner.graphs.whole import EagerGraphRunner, GraphRunner

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
}
SMALL_SHAPES = {name: {**SHAPES[name], **SMALL} for name in parity.MODELS}
WORKLOAD = parity.Workload(prompt_lengths=(5, 17, 64, 90), num_decode=7, chunk=40)
SHORT = parity.Workload(prompt_lengths=(3, 5, 20), num_decode=3, chunk=12)  # interpreted kernels are slow
MAX_SEQ_LEN = 128


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Products this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> parity.Results:
    folder = tmp_path_factory.mktemp("checkpoints")
    return parity.run_parity(parity.MODELS, ("torch", "triton"), folder, shapes=SMALL_SHAPES, workload=WORKLOAD)


def test_parity_of_small_models(results: parity.Results) -> None:
    assert results["parity_worst_fp32_ratio"] <= parity.FP32_BOUND
    for slug in ("qwen3_0_6b", "llama_3_2_1b"):
        assert results[f"parity_{slug}_bf16_kl_transformers"] > 0
        for page_size in (1, 16, 64):
            # Few positions of a small model, so the bound is wider than that of the real shapes.
            assert 0.2 < results[f"parity_{slug}_kl_ratio_torch_page{page_size}"] < 1.5
            assert 0.2 < results[f"parity_{slug}_decode_kl_ratio_torch_page{page_size}"] < 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="triton runs on a GPU")
def test_a_backend_that_cannot_run_here_is_null(results: parity.Results) -> None:
    assert results["parity_qwen3_0_6b_kl_ratio_triton_page64"] is None
    assert results["parity_llama_3_2_1b_decode_kl_ratio_triton_page64"] is None


def test_a_backend_that_fails_costs_no_other(
    results: parity.Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LogitsRunner.run

    def fails_with_small_pages(self: LogitsRunner, chunk: int) -> torch.Tensor:
        if self.page_size == 16:
            raise RuntimeError("no kernel")
        return run(self, chunk)

    monkeypatch.setattr(LogitsRunner, "run", fails_with_small_pages)
    found = parity.run_parity(["qwen3-0.6b"], ["torch"], tmp_path, shapes=SMALL_SHAPES, workload=WORKLOAD)
    assert math.isnan(found["parity_qwen3_0_6b_kl_ratio_torch_page16"])
    assert math.isnan(found["parity_worst_kl_ratio"])
    assert found["parity_qwen3_0_6b_kl_ratio_torch_page1"] == results["parity_qwen3_0_6b_kl_ratio_torch_page1"]
    assert parity.exit_code(found) == 1


def test_the_exit_code_knows_the_bounds() -> None:
    good = {"parity_worst_fp32_ratio": 1e-5, "parity_worst_kl_ratio": 1.1, "parity_x_kl_ratio_fa_page64": None}
    assert parity.exit_code(good) == 0
    assert parity.exit_code({**good, "parity_worst_kl_ratio": 1.3}) == 1
    assert parity.exit_code({**good, "parity_worst_fp32_ratio": 2e-4}) == 1


class Checkpoint:
    """One small model in bf16 with its tokens."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = save_checkpoint(name, SMALL_SHAPES[name], folder)

    def model(self, dtype: torch.dtype) -> CausalLM:
        config, device = ModelConfig.load(self.folder), torch.device("cpu")
        return build_model(config, self.folder, LoadConfig(dtype=dtype, device=device, max_seq_len=MAX_SEQ_LEN))

    def logits(
        self, model: CausalLM, backend: str, workload: parity.Workload = WORKLOAD, graphs: GraphRunner | None = None
    ) -> torch.Tensor:
        sequences = workload.sequences(SMALL["vocab_size"])
        runner = LogitsRunner(model, backend, sequences, page_size=16, max_seq_len=MAX_SEQ_LEN, graphs=graphs)
        return runner.run(workload.chunk)


@pytest.fixture(scope="module", params=parity.MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def test_padded_batches_and_interpreted_kernels(checkpoint: Checkpoint) -> None:
    """The way of captured graphs, padding included, and the `triton` backend give the reference's logits."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    model = checkpoint.model(torch.float32)
    expected = checkpoint.logits(model, "torch", SHORT)
    for backend, sizes in (("triton", (1, 2, 4)), ("torch", (4,))):
        got = checkpoint.logits(model, backend, SHORT, EagerGraphRunner(sizes))
        assert parity.largest_ratio(expected, got) <= 1e-5


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj", "input_layernorm"])
def test_faults_show(checkpoint: Checkpoint, name: str) -> None:
    """A tensor of one layer that is a tenth too large is far above the bound: the distributions are sharp enough."""
    sequences = WORKLOAD.sequences(SMALL["vocab_size"])
    reference = transformers_logits(checkpoint.folder, sequences, torch.float32)
    theirs = transformers_logits(checkpoint.folder, sequences, torch.bfloat16)
    bound = parity.KL_BOUND * parity.kl_divergence(reference, theirs).mean()
    model = checkpoint.model(torch.bfloat16)
    with torch.no_grad():
        (part,) = (part for part in weight_parts(model) if part.name == f"model.layers.1.{name}.weight")
        part.target.mul_(1.1)
    assert parity.kl_divergence(reference, checkpoint.logits(model, "torch")).mean() > 3 * bound


def test_the_schedule_computes_every_token_once() -> None:
    for lengths, num_decode, chunk in (
        ((5, 17, 64, 90), 9, 40),
        ((3,), 2, 100),
        ((7, 300, 12), 0, 64),
        ((4, 90), 1, 8),
    ):
        sequences = Sequences(tuple((0,) * (length + num_decode) for length in lengths), lengths)
        computed = [0] * len(lengths)
        for step in schedule(sequences, chunk):
            assert step.chunks or step.decode
            for row, start, end in step.chunks:
                assert start == computed[row] < end <= lengths[row]
                computed[row] = end
            for row in step.decode:
                assert computed[row] >= lengths[row]
                computed[row] += 1
        assert computed == [len(tokens) for tokens in sequences.tokens]
    assert any(step.chunks and step.decode for step in schedule(WORKLOAD.sequences(10), WORKLOAD.chunk))


def test_divergence_and_ratio() -> None:
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    expected = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert parity.kl_divergence(p.log(), q.log()).tolist() == pytest.approx([0, expected], abs=1e-7)
    assert parity.largest_ratio(torch.tensor([[1.0, -4.0]]), torch.tensor([[1.0, -3.0]])) == 0.25
    assert parity.mean_entropy(torch.zeros(3, 8)) == pytest.approx(math.log(8))
