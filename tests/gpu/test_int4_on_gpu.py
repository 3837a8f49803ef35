"""4-bit weights on a GPU against their torch reference: every way of multiplying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear import marlin_library
from minisgl_backend.kernels.linear.choose import MARLIN_ROWS
from minisgl_backend.kernels.linear.int4_torch import Int4Kernels, dequantize
from minisgl_backend.kernels.linear.marlin import Marlin, MarlinWeight, words_along_inputs
from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels
from tests.unit.kernels.int4_weights import random_weight, relative
from tests.unit.kernels.marlin_reference import MarlinReference

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU with bfloat16"
)


def kernels() -> Any:
    from minisgl_backend.kernels.linear.int4_triton import TritonInt4Kernels
    from minisgl_backend.kernels.triton_ops import TritonOps, TritonPlainKernels

    device = torch.device("cuda")
    return TritonInt4Kernels(TritonPlainKernels(TritonOps(device), device), device)


@pytest.mark.parametrize(
    ("kind", "group", "zeros"),
    [("plain", 128, False), ("norm residual", 128, True), ("gated norm", 32, True), ("bias", -1, False)],
)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, BF16), (8, FP16), (9, BF16), (16, FP16), (33, BF16), (64, FP16), (65, BF16), (200, FP16), (2048, BF16)],
)
def test_linear(rows: int, kind: str, group: int, zeros: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    size_in = 1920 if kind == "bias" else 2048  # planes of 16 and of 32
    x = torch.randn(rows, size_in, device="cuda").to(dtype)
    weight = random_weight(1088, size_in, group=group, zeros=zeros, dtype=dtype, device="cuda")
    options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
    if "norm" in kind:
        options |= {"norm_weight": (torch.rand(size_in, device="cuda") + 0.5).to(dtype), "eps": 1e-6}
    if "bias" in kind:
        options["bias"] = torch.randn(1088, device="cuda").to(dtype)
    residual = torch.randn(rows, 1088, device="cuda").to(dtype) if "residual" in kind else None
    plain = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    expected = Int4Kernels(TorchPlainKernels(TorchOps())).linear(
        x.float(), weight, residual=None if residual is None else residual.float(), **plain
    )
    found = kernels().linear(x, weight, residual=None if residual is None else residual.clone(), **options)
    assert relative(found, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_numbers_are_exact() -> None:
    """Each of the 16 at each place of a block, with each zero point: x picks one input."""
    from minisgl_backend.kernels.linear.int4_triton import dequantize_rows

    for plane in (16, 32):
        block = 8 * plane
        weight = random_weight(256, block, group=block, zeros=True, dtype=BF16, device="cuda", plane=plane)
        weight.scales.fill_(1.0)
        expected = dequantize(weight, torch.bfloat16)
        scratch = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        assert torch.equal(dequantize_rows(weight, slice(0, 256), torch.bfloat16, scratch), expected)
        one = torch.eye(block, device="cuda", dtype=torch.bfloat16)
        for rows in (8, 16, 64):
            for start in range(0, block, rows):
                found = kernels().linear(one[start : start + rows], weight)
                assert torch.equal(found, expected[:, start : start + rows].t())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 3000])
def test_experts(tokens: int, zeros: bool) -> None:
    torch.manual_seed(tokens)
    experts, k, hidden, size = 32, 4, 512, 192
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(experts, device="cuda")[:k] for _ in range(tokens)])
    shares = torch.rand(tokens, k, device="cuda")
    gate_up = random_weight(experts, 2 * size, hidden, group=128, zeros=zeros, dtype=torch.bfloat16, device="cuda")
    down = random_weight(experts, hidden, size, group=64, zeros=zeros, dtype=torch.bfloat16, device="cuda")
    expected = Int4Kernels(TorchPlainKernels(TorchOps())).moe(x.float(), ids, shares, gate_up, down)
    assert relative(kernels().moe(x, ids, shares, gate_up, down), expected) < 1e-2


needs_marlin = pytest.mark.skipif(
    not marlin_library.is_installed(), reason=f"needs vLLM's library: {marlin_library.REMEDY}"
)


@needs_marlin
def test_marlins_layout() -> None:
    """What its operator makes of a weight, and that the reference in torch makes the same."""
    operators = marlin_library.operators()
    assert operators is not None
    weight = random_weight(192, 384, group=64, zeros=True, dtype=BF16, device="cuda")
    found = Marlin(operators, torch.device("cuda")).repack(weight)
    assert found is not None
    none = torch.empty(0, dtype=torch.int32)
    expected = MarlinReference().gptq_marlin_repack(words_along_inputs(weight).cpu(), none, 384, 192, 4, False)
    assert torch.equal(found.words.cpu(), expected)


@needs_marlin
@pytest.mark.parametrize(
    ("kind", "size_in", "group", "zeros"),
    [
        ("plain", 2048, 128, False),
        ("norm residual", 2048, 128, True),
        ("gated norm", 2048, 32, True),
        ("gated", 2048, 64, False),
        ("bias", 1920, -1, True),
        ("residual", 1920, 96, False),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_marlin(kind: str, size_in: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """In float16 on Hopper the driver compiles for up to a minute first."""
    ours = kernels()
    weight = random_weight(1088, size_in, group=group, zeros=zeros, dtype=dtype, device="cuda")
    assert ours.second_layout_bytes(weight) > 0
    twice = replace(weight, second=ours.second_layout(weight))
    assert isinstance(twice.second, MarlinWeight)
    for rows in (MARLIN_ROWS[0], 33, 64, 100, 200, MARLIN_ROWS[-1]):
        torch.manual_seed(rows)
        x = torch.randn(rows, size_in, device="cuda").to(dtype)
        options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
        if "norm" in kind:
            options |= {"norm_weight": (torch.rand(size_in, device="cuda") + 0.5).to(dtype), "eps": 1e-6}
        if "bias" in kind:
            options["bias"] = torch.randn(1088, device="cuda").to(dtype)
        residual = torch.randn(rows, 1088, device="cuda").to(dtype) if "residual" in kind else None
        plain = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        expected = Int4Kernels(TorchPlainKernels(TorchOps())).linear(
            x.float(), weight, residual=None if residual is None else residual.float(), **plain
        )
        found = ours.linear(x, twice, residual=None if residual is None else residual.clone(), **options)
        assert relative(found, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@needs_marlin
def test_numbers_are_exact_in_marlin() -> None:
    """Each of the 16, with each zero point, at each place of a tile; and in a CUDA graph."""
    ours = kernels()
    weight = random_weight(192, 256, group=32, zeros=True, dtype=BF16, device="cuda")
    weight.scales.fill_(1.0)
    twice = replace(weight, second=ours.second_layout(weight))
    expected = dequantize(weight, torch.bfloat16)
    one = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(ours.linear(one, twice), expected.t())
    graph, some = torch.cuda.CUDAGraph(), one[:64].clone()
    with torch.cuda.graph(graph):
        found = ours.linear(some, twice)
    some.copy_(one[64:128])
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, expected[:, 64:128].t())
