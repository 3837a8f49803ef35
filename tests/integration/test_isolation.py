"""What is no number stays with the sequence that brought it: on every path of the CPU backend, with page sharing,
overlap, chunks, preemption, padding and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from tests.poisoned import assert_isolated, save_poisoned

OPTIONS: dict[str, Any] = {"num_pages": 600, "page_size": 4, "max_running_requests": 12, "max_prefill_length": 512}
CHUNKS = {"max_prefill_length": 48, "mixed_prefill_length": 32}
CAPTURED = {"cuda_graph_max_bs": 12, "cuda_graph_max_tokens": 128}


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({}, True),
        ({"page_size": 1, "num_pages": 2400, **CHUNKS}, True),
        ({"page_size": 16, "num_pages": 150, **CHUNKS}, False),
        ({"cache_type": "naive", "mixed_prefill_length": 0, "page_size": 64, "num_pages": 40}, True),
        ({"num_pages": 130, "max_seq_len_override": 400, **CHUNKS}, True),
        ({**CAPTURED, **CHUNKS}, True),
        ({"tp": 2, **CAPTURED, **CHUNKS}, True),
    ],
    ids=["whole", "small pages", "sequential", "naive", "starved", "captured", "tp"],
)
def test_nobody_else_fails(tmp_path: Path, options: dict[str, Any], overlap: bool, pytestconfig: pytest.Config) -> None:
    save_poisoned(tmp_path)
    count = 24 if pytestconfig.getoption("--full", default=False) else 12
    environment = Environment(
        overlap=overlap,
        log_level="WARNING",
        flashinfer_tensor_cores=None,
        eager_graphs="cuda_graph_max_bs" in options,
    )
    with LLM(str(tmp_path), dtype="float32", environment=environment, **{**OPTIONS, **options}) as llm:
        assert_isolated(llm, torch.float32, count=count, tolerance=1e-3)


@pytest.mark.parametrize("captured", [False, True])
def test_nobody_else_fails_in_a_mixture_of_experts(tmp_path: Path, captured: bool) -> None:
    save_poisoned(tmp_path, experts=True)
    environment = Environment(overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=captured)
    options = {**OPTIONS, **CHUNKS, **(CAPTURED if captured else {})}
    with LLM(str(tmp_path), dtype="float32", environment=environment, **options) as llm:
        assert_isolated(llm, torch.float32, count=12, tolerance=1e-3)


def test_numbers_that_grow_too_large_for_float16(tmp_path: Path) -> None:
    save_poisoned(tmp_path, torch.float16)
    with LLM(str(tmp_path), dtype="float16", **{**OPTIONS, **CHUNKS}) as llm:
        assert_isolated(llm, torch.float16, count=6, tolerance=0.1)
