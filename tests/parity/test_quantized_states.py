"""Quantized checkpoints of models with states: linear layers that others are fused with, lists of those left as they
are. Logits are those of transformers with the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.tensor_parallel import TensorParallel
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.int4_files import write_int4
from tests.parity.paged import PagedModel
from tests.parity.quantized import VARIANTS, write_fp8
from tests.parity.test_fp8_weights import tokens
from tests.unit.layers.ranks import on_ranks

# Ranks of two and groups of heads have whole blocks.
SIZES: dict[str, Any] = {"intermediate_size": 128, "block_auto_adjust_ff_dim": False}
DELTA_SIZES: dict[str, Any] = {
    **{"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
CASES = [
    ("lfm2", "ct-blocks-weights-only"),
    ("lfm2", "awq"),
    ("lfm2", "gptq"),
    ("lfm2_moe", "ct-weights-only"),
    ("lfm2_moe", "ct"),
    ("qwen3_next", "ct-blocks-weights-only"),
    ("qwen3_next", "awq"),
    ("qwen3_5", "ct-blocks-weights-only"),
    ("qwen3_5", "gptq"),
    ("qwen3_5_moe", "ct-weights-only"),
    ("qwen3_5_moe", "ct"),
]
EVERY_RUN = [("lfm2", "awq"), ("qwen3_5", "ct-blocks-weights-only")]


@pytest.mark.parametrize(
    ("name", "variant"),
    [pytest.param(*case, marks=() if case in EVERY_RUN else (pytest.mark.full,)) for case in CASES],
)
def test_logits(name: str, variant: str, tmp_path: Path) -> None:
    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint(name, source, **(DELTA_SIZES if name.startswith("qwen") else SIZES))
    (write_fp8 if variant in VARIANTS else write_int4)(source, variant, quantized, plain)
    prompt = tokens(40, 1)
    with torch.inference_mode():
        expected = reference_model(plain)(torch.tensor([prompt])).logits[0].float()

    def work(tp: TensorParallel) -> torch.Tensor:
        return PagedModel(quantized, page_size=16, tp=tp).step({0: prompt}, {})[0]

    for logits in (work(TensorParallel.single()), *on_ranks(2, work)):
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
