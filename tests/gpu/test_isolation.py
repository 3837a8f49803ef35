"""What is no number stays with the sequence that brought it, on every attention backend and its page sizes, under CUDA
graphs and in pieces, with the prefix cache: only the victims fail, and whoever comes after them is answered as before.

    python -m pytest tests/gpu/test_isolation.py     about four minutes on an H200, most of them starts
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend import LLM
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.registry import import_failure
from tests.poisoned import assert_isolated, save_poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {
    BF16: 0.5,
    FP16: 0.05,
}  # of log-probabilities around -30, four units of the format: other company, other sums
CELLS = [
    ("fa", 64, BF16),
    ("fa", 128, FP16),
    ("fa", 1, BF16),
    ("fi", 64, BF16),
    ("fi", 16, FP16),
    ("fa,trtllm", 64, BF16),
    ("fa,trtllm", 16, FP16),
    ("triton", 64, FP16),
    ("triton", 4, BF16),
    ("torch", 16, FP16),
]


@pytest.mark.parametrize(("backends", "page_size", "dtype"), CELLS)
def test_nobody_else_fails(backends: str, page_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    for name in backends.split(","):
        entry = BACKENDS[name]
        for needed in (entry.library.package, entry.library.kernels):
            if needed and (reason := import_failure(needed)) is not None:
                pytest.skip(f"{needed}: {reason}")
    save_poisoned(tmp_path, dtype)
    options = {"num_pages": 8192 // page_size, "max_running_requests": 16, "cuda_graph_max_tokens": 256}
    chunks = {"max_prefill_length": 256, "mixed_prefill_length": 128}
    name = str(dtype).removeprefix("torch.")
    with LLM(str(tmp_path), dtype=name, attention_backend=backends, page_size=page_size, **options, **chunks) as llm:
        assert_isolated(llm, dtype, count=100, tolerance=TOLERANCE[dtype])


def test_nobody_else_fails_in_a_mixture_of_experts(tmp_path: Path) -> None:
    save_poisoned(tmp_path, BF16, experts=True)
    options = {"num_pages": 512, "page_size": 16, "max_running_requests": 16, "cuda_graph_max_tokens": 256}
    with LLM(str(tmp_path), dtype="bfloat16", attention_backend="triton", **options) as llm:
        assert_isolated(llm, BF16, count=100, tolerance=TOLERANCE[BF16], outliers=0.1)
