"""Sliding windows through the whole engine against transformers: the same tokens however the engine is run.

Contexts of 150 tokens and more over windows of 24 and less, in every cell of the matrix (page and chunk sizes, warm
prefix cache, preemption, padded steps of graphs and pieces, two ranks) that can touch a window.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import parity
from benchmarks.logits_runner import LogitsRunner
from benchmarks.parity_reference import transformers_logits
from minisgl_backend import LLM
from minisgl_backend.config import Environment
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.cuda_graph import EagerGraphRunner
from tests.gauge.cells import CELLS, Cell
from tests.gauge.harness import expect_short_answers
from tests.parity.checkpoints import VOCAB_SIZE, reference_model, save_checkpoint, save_tokenizer

NAMES = ("mistral-window", "qwen2-windows-above", "qwen3-windows-between")
NUM_TOKENS = 24
BUSY = 6  # prompts at once


class Case:
    """One checkpoint with long prompts, most of which begin alike, and transformers' answers."""

    def __init__(self, name: str, folder: Path) -> None:
        save_checkpoint(name, folder)
        save_tokenizer(folder)
        self.folder = folder
        generator = random.Random(name)
        shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(100)]
        lengths = (50, 60, 45, 75)
        self.prompts = [shared + [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
        self.prompts += [self.prompts[0][20:170], self.prompts[1][:5]]
        assert len(self.prompts) == BUSY
        model = reference_model(folder)
        self.expected = []
        for prompt in self.prompts:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            self.expected.append(ids[0, len(prompt) :].tolist())

    def generate(self, llm: LLM) -> list[list[int]]:
        outputs = llm.generate(self.prompts, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [output.token_ids for output in outputs]


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("checkpoint"))


def test_the_windows_are_there(case: Case) -> None:
    """Without them the answers would be others."""
    config = ModelConfig.load(case.folder)
    assert any(layer.window for layer in config.attention)
    with LLM(str(case.folder), dtype="float32", max_seq_len_override=256, num_pages=256) as llm:
        expected = case.generate(llm)
    assert expected == case.expected
    path = case.folder / "config.json"
    kept = path.read_text()
    path.write_text(
        kept.replace('"sliding_window": ', '"sliding_window": 4').replace('"sliding_attention"', '"full_attention"')
    )
    try:
        with LLM(str(case.folder), dtype="float32", max_seq_len_override=256, num_pages=256) as llm:
            assert case.generate(llm) != case.expected
    finally:
        path.write_text(kept)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "window_cell" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full-matrix", default=False)
        cells = [
            cell for cell in CELLS if (full or cell.sampled) and not cell.starved and cell.options.get("tp", 1) <= 2
        ]
        metafunc.parametrize("window_cell", cells, ids=[cell.name for cell in cells])


def test_the_same_tokens_in_every_cell(case: Case, window_cell: Cell) -> None:
    options: dict[str, Any] = {"page_size": 16, "max_running_requests": BUSY, **window_cell.options}
    options.setdefault("num_pages", 4096 // options["page_size"])
    environment = Environment(
        overlap=window_cell.overlap,
        log_level="WARNING",
        flashinfer_tensor_cores=None,
        eager_graphs=window_cell.eager_graphs,
    )
    with LLM(str(case.folder), environment=environment, dtype="float32", max_seq_len_override=256, **options) as llm:
        assert case.generate(llm) == case.expected
        assert case.generate(llm) == case.expected, "with every prompt in the prefix cache"


@pytest.mark.parametrize("page_size", [1, 16])
def test_preempted_sequences(case: Case, page_size: int) -> None:
    """Four prompts fit together, their answers do not: some begin again, far beyond their windows.

    An answer that ignores its end has a known length and would not be admitted.
    """
    prompts, num_tokens = [prompt[-40:] for prompt in case.prompts[:4]], 100
    options: dict[str, Any] = {"dtype": "float32", "max_seq_len_override": 256, "page_size": page_size}
    with LLM(str(case.folder), num_pages=1024 // page_size, **options) as llm:
        expected = llm.generate(prompts, temperature=0.0, max_tokens=num_tokens)
    with LLM(str(case.folder), num_pages=256 // page_size, **options) as llm:
        expect_short_answers(llm)
        outputs = llm.generate(prompts, temperature=0.0, max_tokens=num_tokens)
        assert llm.stats.total_preempted > 0
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_interpreted_kernels(case: Case) -> None:
    """The `triton` backend over chunks, cached prefixes, mixed steps and padded batches."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_windows_on_gpu.py runs the kernels compiled")
    workload = parity.Workload(prompt_lengths=(3, 30, 45), num_decode=3, chunk=20)
    sequences = workload.sequences(VOCAB_SIZE)
    expected = transformers_logits(case.folder, sequences, torch.float32)
    model = build_model(
        ModelConfig.load(case.folder), case.folder, dtype=torch.float32, device=torch.device("cpu"), max_seq_len=64
    )
    runner = LogitsRunner(model, "triton", sequences, page_size=16, max_seq_len=64, graphs=EagerGraphRunner((1, 2, 4)))
    assert parity.largest_ratio(expected, runner.run(workload.chunk)) <= 1e-4
