"""Which modules of transformers get kernels of this project, and that they compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.kernels.select import select_kernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.models.fallback.fuse import fuse
from tests.parity.decoder_types import small_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model_type", "norms", "experts", "others"),
    [
        ("qwen3_moe", 3 * 4 + 1, 3, 0),  # two norms a layer, and those of queries and keys
        ("gemma2", 3 * 4 + 1, 0, 0),  # weights around 0
        ("gpt2", 0, 0, 0),  # LayerNorm
        ("gpt_oss", 3 * 2 + 1, 0, 3),  # experts with biases, whose rows take turns
    ],
)
def test_modules_with_kernels_compute_the_same(model_type: str, norms: int, experts: int, others: int) -> None:
    model: Any = small_model(model_type, attn_implementation="eager", experts_implementation="eager").eval()
    tokens = torch.arange(3, 23)[None]
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        ops = TorchOps()
        left = fuse(model, ops, select_kernels(ops, CPU).mixtures)
        found = model(tokens, use_cache=False).logits
    replaced = [type(module.__dict__["forward"]).__name__ for module in model.modules() if "forward" in module.__dict__]
    assert (replaced.count("_Norm"), replaced.count("_Experts"), len(left)) == (norms, experts, others)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
