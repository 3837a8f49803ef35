"""4-bit weights on a GPU against their torch reference: every way of multiplying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.int4.reference import Int4Weight, dequantize
from minisgl_backend.kernels.linear.int4.repacked import LAYOUTS, layout_of
from minisgl_backend.kernels.linear.int4.served import MACHETE_ROWS, MARLIN_ROWS
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.linear.libraries import vllm as vllm_library
from minisgl_backend.kernels.linear.libraries.marlin import Marlin
from minisgl_backend.kernels.linear.libraries.repack import words_by_output
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import by_gpu, by_torch, experts_of
from tests.unit.kernels.int4_weights import random_weight, relative
from tests.unit.kernels.marlin_reference import MarlinReference

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU with bfloat16"
)


def kernels() -> Any:
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    return LinearKernels("int4", GemmDevice(TritonOps(device), device))


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
    expected = LinearKernels("int4", GemmDevice(TorchOps())).linear(
        x.float(), weight, GemmCall(residual=None if residual is None else residual.float(), **plain)
    )
    found = kernels().linear(x, weight, GemmCall(residual=None if residual is None else residual.clone(), **options))
    assert relative(found, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("cut", [(64, 8, 2, 3), (128, 16, 4, 3), (256, 64, 8, 2), (128, 128, 8, 2)])
@pytest.mark.parametrize(("group", "zeros", "gated"), [(128, True, True), (32, False, False), (64, True, False)])
def test_tiles_cut_between_programs(cut: tuple[int, int, int, int], group: int, zeros: bool, gated: bool) -> None:
    """Whole tiles, parts of one and of several; the same bits each time."""
    from minisgl_backend.kernels.linear.int4 import many_rows

    torch.manual_seed(group)
    tile, tile_rows, warps, stages = cut
    device = kernels().device
    for rows, programs in ((tile_rows, 7), (3, 132), (tile_rows + 1, 33)):
        weight = random_weight(1088, 2048, group=group, zeros=zeros, dtype=BF16, device="cuda")
        x = torch.randn(rows, 2048, device="cuda").to(BF16)
        residual = None if gated else torch.randn(rows, 1088, device="cuda").to(BF16)
        call = GemmCall(residual=residual, activation="silu" if gated else None)
        shape = many_rows.ManyShape(tile, tile_rows, warps, stages, 2)
        expected = LinearKernels("int4", GemmDevice(TorchOps())).linear(
            x.float(), weight, call._replace(residual=None if residual is None else residual.float())
        )
        found = [many_rows.linear(x, weight, device.workspace, call, shape, programs) for _ in range(4)]
        assert relative(found[0], expected) < 1e-2
        assert all(torch.equal(found[0], other) for other in found[1:])
    assert int(device.workspace.counters.abs().sum()) == 0


def test_numbers_are_exact() -> None:
    """Each of the 16 at each place of a block, with each zero point: x picks one input."""
    from minisgl_backend.kernels.linear.int4.dequantized import dequantize_rows

    for plane in (16, 32):
        block = 8 * plane
        weight = random_weight(256, block, group=block, zeros=True, dtype=BF16, device="cuda", plane=plane)
        weight.scales.fill_(1.0)
        expected = dequantize(weight, torch.bfloat16)
        assert torch.equal(dequantize_rows(weight, slice(0, 256), torch.empty_like(expected)), expected)
        one = torch.eye(block, device="cuda", dtype=torch.bfloat16)
        for rows in (8, 16, 64):
            for start in range(0, block, rows):
                found = kernels().linear(one[start : start + rows], weight)
                assert torch.equal(found, expected[:, start : start + rows].t())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 3000])
def test_experts(tokens: int, zeros: bool) -> None:
    torch.manual_seed(tokens)
    num_experts, k, hidden, size = 32, 4, 512, 192
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(num_experts, device="cuda")[:k] for _ in range(tokens)])
    shares = torch.rand(tokens, k, device="cuda")
    gate_up = random_weight(num_experts, 2 * size, hidden, group=128, zeros=zeros, dtype=torch.bfloat16, device="cuda")
    down = random_weight(num_experts, hidden, size, group=64, zeros=zeros, dtype=torch.bfloat16, device="cuda")
    experts, call = experts_of(gate_up, down), MixtureCall(Picked(ids, shares))
    assert relative(by_gpu(x, experts, call, "int4"), by_torch(x.float(), experts, call, "int4")) < 1e-2


needs_vllm = pytest.mark.skipif(not vllm_library.is_installed(), reason=f"needs vLLM's library: {vllm_library.REMEDY}")


def in_layout(name: str, weight: Int4Weight) -> tuple[Any, Int4Weight]:
    """Kernels that have this layout alone, and the weight in it as well."""
    if name == "machete" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    operators = vllm_library.operators(name)
    assert operators is not None
    second = LAYOUTS[name].repacker(operators, torch.device("cuda")).repack(weight)
    assert second is not None
    assert second.layout == name
    return kernels(), replace(weight, repacked=second)


@needs_vllm
def test_marlins_layout() -> None:
    """What its operator makes of a weight, and that the reference in torch makes the same."""
    operators = vllm_library.operators("marlin")
    assert operators is not None
    weight = random_weight(192, 384, group=64, zeros=True, dtype=BF16, device="cuda")
    found = Marlin(operators, torch.device("cuda")).repack(weight)
    assert found is not None
    words, none = words_by_output(weight).t().contiguous().cpu(), torch.empty(0, dtype=torch.int32)
    assert torch.equal(found.words.cpu(), MarlinReference().gptq_marlin_repack(words, none, 384, 192, 4, False))


@needs_vllm
def test_the_layout_of_this_gpu() -> None:
    ours = kernels()
    weight = random_weight(256, 384, group=128, zeros=True, dtype=BF16, device="cuda")
    found = layout_of(weight, ours.device.device, ours.device.facts)
    assert found is not None
    second = found[1].repack(weight)
    is_hopper = DeviceFacts.of(torch.device("cuda")).capability == (9, 0)
    assert second is not None
    assert second.layout == ("machete" if is_hopper else "marlin")
    assert found[0] is LAYOUTS[second.layout]


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "size_in", "group", "zeros"),
    [
        ("plain", 2048, 128, False),
        ("norm residual", 2048, 128, True),
        ("gated norm", 2048, 32, True),
        ("gated", 2048, 64, False),
        ("bias", 1920, -1, True),
        ("residual", 1920, 96, False),
        ("norm residual", 1920, 64, True),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", ["machete", "marlin"])
def test_second_layouts(layout: str, kind: str, size_in: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    """In float16 on Hopper the driver compiles Marlin for up to a minute first."""
    size_out, rows_of = (1152, MACHETE_ROWS) if layout == "machete" else (1088, MARLIN_ROWS)
    weight = random_weight(size_out, size_in, group=group, zeros=zeros, dtype=dtype, device="cuda")
    if not LAYOUTS[layout].fits(weight):
        pytest.skip(f"{layout} has no groups of {group}")
    ours, twice = in_layout(layout, weight)
    for rows in (rows_of[0], 33, 64, 100, 200, 256, rows_of[-1]):
        torch.manual_seed(rows)
        x = torch.randn(rows, size_in, device="cuda").to(dtype)
        options: dict[str, Any] = {"activation": "silu" if "gated" in kind else None}
        if "norm" in kind:
            options |= {"norm_weight": (torch.rand(size_in, device="cuda") + 0.5).to(dtype), "eps": 1e-6}
        if "bias" in kind:
            options["bias"] = torch.randn(size_out, device="cuda").to(dtype)
        residual = torch.randn(rows, size_out, device="cuda").to(dtype) if "residual" in kind else None
        plain = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        expected = LinearKernels("int4", GemmDevice(TorchOps())).linear(
            x.float(), weight, GemmCall(residual=None if residual is None else residual.float(), **plain)
        )
        found = ours.linear(x, twice, GemmCall(residual=None if residual is None else residual.clone(), **options))
        assert relative(found, expected) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@needs_vllm
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("zeros", [False, True])
def test_every_tile_of_machete(zeros: bool, dtype: torch.dtype) -> None:
    """Those that contend for other row counts as well, with one tile of outputs and with rows that fill none."""
    for size_out, size_in, group in ((128, 128, 64), (1152, 1088, 64), (640, 4096, 128)):
        weight = random_weight(size_out, size_in, group=group, zeros=zeros, dtype=dtype, device="cuda")
        _, twice = in_layout("machete", weight)
        assert twice.repacked is not None
        for rows in (1, 17, 130, 600):
            x = torch.randn(rows, size_in, device="cuda").to(dtype)
            expected = x.float() @ dequantize(weight, torch.float32).t()
            for kernel in twice.repacked.kernels:
                assert relative(twice.repacked.linear(x, kernel), expected) < (1e-2 if dtype == BF16 else 2e-3), kernel


@needs_vllm
@pytest.mark.parametrize("layout", ["machete", "marlin"])
def test_numbers_are_exact_in_second_layouts(layout: str) -> None:
    """Each of the 16, with each zero point, at each place of a tile; and in a CUDA graph."""
    weight = random_weight(256, 256, group=64, zeros=True, dtype=BF16, device="cuda")
    weight.scales.fill_(1.0)
    ours, twice = in_layout(layout, weight)
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
