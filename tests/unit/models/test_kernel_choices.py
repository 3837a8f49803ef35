"""Kernels of whole models, without data: layers say what their weights are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.model_shapes import SHAPES
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.kernel_choices import kernel_choices

H200 = DeviceFacts.named("h200")


def kernels(model: ModelConfig, facts: DeviceFacts = H200, **more: int) -> dict[tuple[str, str], str]:
    """(weight, what is inside) -> kernels for 1, 8 and 4,096 rows, "-" where another entry has them."""
    rows = (1, 8, 4096)
    found = kernel_choices(model, facts, torch.bfloat16, rows=rows, **more)
    return {
        (weight.path, weight.inside): " ".join(by[count].kernel if count in by else "-" for count in rows)
        for weight, by in found.items()
    }


def test_norms_and_residuals_are_where_ranks_leave_them() -> None:
    qkv = "self_attn.q_proj+k_proj+v_proj"
    assert kernels(ModelConfig.from_dicts(SHAPES["qwen3-32b"], {}), tp_size=2) == {
        (qkv, "norm"): "small_rows cublaslt cublaslt",  # of the first layer
        (qkv, ""): "small_rows long_rows -",
        (qkv, "elsewhere"): "- - cublaslt",  # two micro-batches write to one tensor
        ("self_attn.o_proj", ""): "small_rows cublaslt cublaslt",
        ("mlp.gate_proj+up_proj", "silu"): "small_rows small_rows cublaslt",
        ("mlp.down_proj", ""): "small_rows long_rows cublaslt",
        ("lm_head", "elsewhere"): "cublaslt cublaslt -",
    }
    over_nccl = kernels(ModelConfig.from_dicts(SHAPES["qwen3-32b"], {}), DeviceFacts.cpu(False), tp_size=2)
    assert ("mlp.down_proj", "residual") in over_nccl


def test_a_mixture_has_the_kernels_around_it_inside() -> None:
    found = kernels(ModelConfig.from_dicts(SHAPES["qwen3-30b-a3b"], {}))
    assert found["mlp.experts", "router norm residual"] == "early_router few_tokens grouped_tma"
    assert found["self_attn.o_proj", "residual"] == "- small_rows cublaslt"
    over_ranks = kernels(ModelConfig.from_dicts(SHAPES["qwen3-30b-a3b"], {}), tp_size=2)
    assert over_ranks["mlp.experts", "router"] == "one_token few_tokens grouped_tma"


@pytest.mark.parametrize(("own_kernels", "expected"), [(True, "cpu cpu torch"), (False, "torch torch torch")])
def test_processors(own_kernels: bool, expected: str) -> None:
    facts = replace(DeviceFacts.cpu(), own_kernels=own_kernels)
    assert kernels(ModelConfig.from_dicts(SHAPES["llama-3.2-1b"], {}), facts)["mlp.down_proj", "residual"] == expected


def test_projections_around_latents_have_kernels() -> None:
    found = kernels(ModelConfig.from_dicts(SHAPES["deepseek-v2-lite"], {}))
    assert ("self_attn.q_proj+kv_a_proj_with_mqa", "norm") in found
    assert any(path == "self_attn.o_proj" for path, _ in found)


def test_blocks_of_scales_are_those_of_a_rank() -> None:
    """Llama 3.2's keys are 64 rows on each rank of eight: torch's GEMM of 128 x 128 does not serve what they cut."""
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    model = ModelConfig.from_dicts({**SHAPES["llama-3.2-1b"], "quantization_config": blocks}, {})
    qkv = "self_attn.q_proj+k_proj+v_proj", "norm"
    for ranks, expected in ((4, "scaled_mm_blocks"), (8, "fp8_many_rows")):
        assert kernels(model, tp_size=ranks)[qkv].split()[-1] == expected


def test_kernels_of_vllm_multiply_with_4_bits() -> None:
    model = ModelConfig.from_dicts(SHAPES["qwen3-14b-awq"], {})
    without = replace(H200, libraries=frozenset())
    for ranks, facts, expected in (
        (1, H200, "machete"),
        (4, H200, "machete"),
        (1, DeviceFacts.named("a100"), "marlin"),
        (1, without, "int4"),
    ):
        found = kernel_choices(model, facts, torch.bfloat16, rows=(64,), tp_size=ranks)
        quantized = [by[64].kernel for weight, by in found.items() if weight.weight_format == "int4"]
        assert len(quantized) >= 4
        assert {kernel.partition("_")[0] for kernel in quantized} == {expected}
