"""FP8 checkpoints in float32 against transformers with the dequantized weights, whose activations are quantized alike.

Half of the logits within 2e-3 of the largest one; with activations as they are all within 1e-3. Each rank of two has
the whole model's numbers and scales, or parts of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.fp8_checkpoint import Fp8CheckpointExpertsMethod, Fp8CheckpointLinearMethod
from minisgl_backend.weights.method import ExpertsMethod, LinearMethod
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.parity.quantized import BLOCK, INPUT_SCALE, VARIANTS, write_fp8
from tests.parity.test_fp8_weights import (
    MOST_KL_OF_RANKS,
    MOST_OF_ONE,
    TOLERANCE,
    fp8,
    kl,
    quantize_activations,
    tokens,
)
from tests.unit.layers.ranks import on_ranks

# Tied and cut; biases; q and k in another order; experts; merged tensors; a weight that is computed with (kv_b_proj).
CASES = [
    ("qwen3-tied-sharded", "fp8-blocks"),
    ("qwen3-tied-sharded", "ct-weights-only"),
    ("llama-bias-mha", "modelopt"),
    ("llama-bias-mha", "fp8-tensor"),
    ("ernie4_5", "ct-blocks"),
    ("qwen3_moe", "fp8-blocks"),
    ("qwen3_moe", "ct-tensor-static"),
    ("mixtral", "ct-channel"),
    ("llama-bias-mha", "ct-blocks-weights-only"),
    ("qwen3_moe", "ct-blocks-weights-only"),
    ("ernie4_5", "ct-blocks-weights-only"),
    ("deepseek_v3", "ct-blocks-weights-only"),
]


def of_input(activations: str | None) -> Any:
    def groups(x: torch.Tensor) -> torch.Tensor:
        return fp8(x.unflatten(-1, (-1, BLOCK[1]))).flatten(-2)

    def static(x: torch.Tensor) -> torch.Tensor:
        return (x / INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * INPUT_SCALE

    return {"token": fp8, "group": groups, "static": static, None: lambda x: x}[activations]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits(name: str, variant: str, tmp_path: Path) -> None:
    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint(name, source)
    write_fp8(source, variant, quantized, plain)
    reference, activations = reference_model(plain), VARIANTS[variant][1]
    if activations is not None:
        quantize_activations(reference, of_input(activations))
    prompt = tokens(40, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].float()
    has_experts = any("experts" in key for key in reference.state_dict())

    def check(logits: torch.Tensor) -> None:
        difference = (logits - expected).abs() / expected.abs().max()
        assert difference.median() <= (TOLERANCE if activations is not None else 1e-4)
        assert difference.max() <= (MOST_OF_ONE if activations is not None else 1e-3)

    paged = PagedModel(quantized, page_size=16)
    methods = [one for one in paged.model.modules() if isinstance(one, (LinearMethod, ExpertsMethod))]
    fp8_methods = (Fp8CheckpointLinearMethod, Fp8CheckpointExpertsMethod)
    expected_methods = 20 if name == "deepseek_v3" else 9 if has_experts else 12
    assert sum(isinstance(one, fp8_methods) for one in methods) == expected_methods
    check(paged.step({0: prompt}, {})[0])
    if activations is None:
        check_ranks(quantized, prompt, check)
    elif not has_experts:  # activations have scales of their own on each rank; by that a router takes other experts
        check_ranks(quantized, prompt, lambda logits: kl_is_small(expected, logits))


def kl_is_small(expected: torch.Tensor, logits: torch.Tensor) -> None:
    assert kl(expected, logits) < MOST_KL_OF_RANKS


def check_ranks(folder: Path, prompt: list[int], check: Callable[[torch.Tensor], None]) -> None:
    def work(tp: TensorParallel) -> torch.Tensor:
        return PagedModel(folder, page_size=16, tp=tp).step({0: prompt}, {})[0]

    for logits in on_ranks(2, work):
        check(logits)
