"""Sliding windows, chunks and latents (MLA) by the kernels in Triton's interpreter, against transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.logits_runner import LogitsRunner
from benchmarks.parity_reference import transformers_logits
from minisgl_backend.models.build import build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.runner.graphs.whole import EagerGraphRunner
from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import save_checkpoint

CPU = torch.device("cpu")
IN_EVERY_RUN = "gpt_oss"  # with windows and without
WITH_FULL = ("mistral-window", "gemma3", "llama4", "deepseek_v3-one-group")


@pytest.mark.parametrize("name", [IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.full) for name in WITH_FULL)])
def test_interpreted_kernels(name: str, tmp_path: Path) -> None:
    """The `triton` backend over chunks, cached prefixes, mixed steps and padded batches."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_windows_on_gpu.py runs the kernels compiled")
    save_checkpoint(name, tmp_path)
    workload = parity.Workload(prompt_lengths=(3, 30, 45), num_decode=3, chunk=20)
    sequences = workload.sequences(VOCAB_SIZE)
    expected = transformers_logits(tmp_path, sequences, torch.float32)
    config = ModelConfig.load(tmp_path)
    model = build_model(config, tmp_path, LoadConfig(dtype=torch.float32, device=CPU, max_seq_len=64))
    runner = LogitsRunner(model, "triton", sequences, page_size=16, max_seq_len=64, graphs=EagerGraphRunner((1, 2, 4)))
    assert parity.largest_ratio(expected, runner.run(workload.chunk)) <= 1e-4
