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
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, FineGrainedFP8Config

from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.tensor_parallel import TensorParallel
from minisgl_backend.weights.dequantized import DequantizedLinearMethod
from minisgl_backend.weights.experts.method import ExpertsMethod
from minisgl_backend.weights.experts.scaled import Fp8CheckpointExpertsMethod, Int8ExpertsMethod
from minisgl_backend.weights.fp8_checkpoint import Fp8CheckpointLinearMethod
from minisgl_backend.weights.int8 import Int8LinearMethod
from minisgl_backend.weights.method import LinearMethod
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.parity.quantized import BLOCK, INPUT_SCALE, VARIANTS, write_fp8
from tests.parity.test_fp8_weights import (
    MOST_KL,
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
    ("llama-bias-mha", "ct-int8"),
    ("qwen3_moe", "ct-int8"),
    ("qwen3_moe", "fp8-blocks"),
    ("qwen3_moe", "ct-tensor-static"),
    ("mixtral", "ct-channel"),
    ("llama-bias-mha", "ct-blocks-weights-only"),
    ("qwen3_moe", "ct-blocks-weights-only"),
    ("ernie4_5", "ct-blocks-weights-only"),
    ("deepseek_v3", "ct-blocks-weights-only"),
]

# Each rank of two has whole blocks, or parts of 32 inputs or more.
DENSE_CUT_IN_BLOCKS = {"intermediate_size": 128}
_EXPERTS_CUT_IN_BLOCKS = {**DENSE_CUT_IN_BLOCKS, "moe_intermediate_size": 64}
CUT_IN_BLOCKS = {
    "qwen3_moe": _EXPERTS_CUT_IN_BLOCKS,
    "deepseek_v3": {**_EXPERTS_CUT_IN_BLOCKS, "v_head_dim": 32},
}


def of_input(activations: str | None) -> Any:
    def groups(x: torch.Tensor) -> torch.Tensor:
        return fp8(x.unflatten(-1, (-1, BLOCK[1]))).flatten(-2)

    def static(x: torch.Tensor) -> torch.Tensor:
        return (x / INPUT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).float() * INPUT_SCALE

    def int8(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
        return (x / scale).round().clamp(-127, 127) * scale

    return {"token": fp8, "group": groups, "static": static, "int8": int8, None: lambda x: x}[activations]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits(name: str, variant: str, tmp_path: Path) -> None:
    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint(name, source, **(CUT_IN_BLOCKS.get(name, DENSE_CUT_IN_BLOCKS) if "blocks" in variant else {}))
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
    quantized_methods = (
        Fp8CheckpointLinearMethod, Fp8CheckpointExpertsMethod, Int8LinearMethod, Int8ExpertsMethod,
        DequantizedLinearMethod,
    )  # fmt: skip
    expected_methods = 20 if name == "deepseek_v3" else 9 if has_experts else 12
    assert sum(isinstance(one, quantized_methods) for one in methods) == expected_methods
    check(paged.step({0: prompt}, {})[0])
    if activations is None:
        check_ranks(quantized, prompt, check)
    elif not has_experts:  # activations have scales of their own on each rank; by that a router takes other experts
        check_ranks(quantized, prompt, lambda logits: kl_is_small(expected, logits))


def test_what_the_activations_cost(tmp_path: Path) -> None:
    """Of the demo model in blocks of 128 x 128: against the same weights in float32, activations as they are."""
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    write_fp8(find_model_dir("demo"), "fp8-blocks-128", quantized, plain)
    prompt = AutoTokenizer.from_pretrained(plain).encode(
        "What is 17 + 25? 42. Count from 1 to 9: 1, 2, 3, 4, 5, 6, 7, 8"
    )
    expected, found = (PagedModel(folder, page_size=16).step({0: prompt}, {})[0] for folder in (plain, quantized))
    assert kl(expected, found) < MOST_KL


@pytest.mark.parametrize("variant", ["fp8-blocks", "ct-blocks", "ct-channel", "ct-int8"])
def test_transformers_reads_what_is_written_here(variant: str, tmp_path: Path) -> None:
    """And dequantizes it to the same weights."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors, from Python 3.11 on")
    source, quantized, plain = (tmp_path / kind for kind in ("source", "quantized", "plain"))
    save_checkpoint("llama", source, **DENSE_CUT_IN_BLOCKS)
    write_fp8(source, variant, quantized, plain)
    how = FineGrainedFP8Config(dequantize=True) if "fp8" in variant else CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, quantization_config=how)
    found = model.state_dict()
    for name, expected in reference_model(plain).state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-7)


def kl_is_small(expected: torch.Tensor, logits: torch.Tensor) -> None:
    assert kl(expected, logits) < MOST_KL_OF_RANKS


def check_ranks(folder: Path, prompt: list[int], check: Callable[[torch.Tensor], None]) -> None:
    def work(tp: TensorParallel) -> torch.Tensor:
        return PagedModel(folder, page_size=16, tp=tp).step({0: prompt}, {})[0]

    for logits in on_ranks(2, work):
        check(logits)
