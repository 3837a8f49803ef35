"""GEMMs and mixtures with weights as they lie, by the compiled CPU kernels, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.kernels.candidate import PLAIN
from minisgl_backend.kernels.cpu.ops import CpuOps
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.choose import CPU_ROWS
from minisgl_backend.kernels.linear.fp8.reference import Fp8Weight, quantize_outputs
from minisgl_backend.kernels.linear.int4.reference import Int4Weight, num_groups, pack, plane_size
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels, PlainKernels
from minisgl_backend.kernels.moe.call import MixtureCall, Picked
from minisgl_backend.kernels.moe.mixtures import ExpertsKernels, MixtureKernels
from minisgl_backend.kernels.moe.mxfp4.weight import Mxfp4Weight
from minisgl_backend.kernels.torch_ops import TorchOps
from tests.mixtures import by_torch, experts_of
from tests.unit.kernels.test_cpu_kernels import EPS, ops, same_numbers  # noqa: F401

FORMATS = ("plain", "fp8", "fp8 static", "fp8 blocks", "int8", "int4 128", "int4 128 zeros", "int4 16 zeros", "int4 32")
BLOCK = 128


def weight_of(kind: str, dtype: torch.dtype, *shape: int) -> Any:
    """shape: [(experts,) outputs, inputs]"""
    name, *details = kind.split()
    *experts, outputs, inputs = shape
    weight = torch.randn(shape) * inputs**-0.5
    if name == "fp8":
        numbers, scale = quantize_outputs(weight)
        if "blocks" in details:
            scale = torch.rand(*experts, -(-outputs // BLOCK), -(-inputs // BLOCK)) * 1e-2
            return Fp8Weight(numbers, scale, block=(BLOCK, BLOCK))
        return Fp8Weight(numbers, scale, torch.tensor(0.01) if "static" in details else None)
    if name == "int8":
        scale = weight.abs().amax(-1) / 127
        return Int8Weight((weight / scale.unsqueeze(-1)).round().to(torch.int8), scale)
    if name == "int4":
        group = int(details[0])
        plane = plane_size(inputs, group)
        of_groups = (*experts, num_groups(inputs, group, plane), outputs)
        return Int4Weight(
            words=pack(torch.randint(0, 16, shape, dtype=torch.uint8), plane),
            scales=(torch.rand(of_groups) * 0.02).to(dtype),
            zeros=torch.randint(0, 16, of_groups, dtype=torch.uint8) if "zeros" in details else None,
            size_in=inputs, group=group, plane=plane,
        )  # fmt: skip
    if name == "mxfp4":
        blocks = torch.randint(0, 256, (*experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        return Mxfp4Weight(blocks, torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8))
    return weight.to(dtype)


def kernels_of(kind: str, ops: TorchOps) -> LinearKernels[Any]:  # noqa: F811
    name, device = kind.split()[0], GemmDevice(ops)
    return PlainKernels(device) if name == PLAIN else LinearKernels(name, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(50, 1024), (98, 384)])
@pytest.mark.parametrize("kind", FORMATS)
def test_linear(ops: CpuOps, kind: str, outputs: int, size: int, dtype: torch.dtype) -> None:  # noqa: F811
    weight = weight_of(kind, dtype, outputs, size)
    own, torchs = kernels_of(kind, ops), kernels_of(kind, TorchOps())
    for rows in (1, 2, 5, CPU_ROWS, CPU_ROWS + 1):
        x = torch.randn(rows, size).to(dtype)
        calls: list[Any] = [
            {},
            {"norm_weight": torch.rand(size).to(dtype), "eps": EPS},
            {"activation": "silu"},
            {"activation": "gelu_tanh"},
            {"bias": torch.randn(outputs).to(dtype), "residual": torch.randn(rows, outputs).to(dtype)},
        ]
        for call in calls:
            copies: Any = {name: one.clone() if torch.is_tensor(one) else one for name, one in call.items()}
            assert_close(own.linear(x, weight, GemmCall(**call)), torchs.linear(x, weight, GemmCall(**copies)))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_is_the_same_alone_and_among_others(ops: CpuOps, kind: str) -> None:  # noqa: F811
    weight, kernels = weight_of(kind, torch.float16, 50, 256), kernels_of(kind, ops)
    x = torch.randn(CPU_ROWS, 256).half()
    together = kernels.linear(x, weight)
    for row in (0, 3, CPU_ROWS - 1):
        assert torch.equal(together[row : row + 1], kernels.linear(x[row : row + 1], weight))


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_number_stays_in_its_row(ops: CpuOps, kind: str) -> None:  # noqa: F811
    weight, x = weight_of(kind, torch.bfloat16, 34, 256), torch.randn(3, 256).bfloat16()
    x[1, 7] = float("nan")
    found = kernels_of(kind, ops).linear(x, weight)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize(
    "kind", ["plain", "plain bias", "fp8", "fp8 blocks", "int8", "int4 32", "int4 128", "mxfp4 bias"]
)
def test_mixture(ops: CpuOps, kind: str, tokens: int, dtype: torch.dtype) -> None:  # noqa: F811
    num_experts, hidden, inner, k, name = 6, 256, 128, 2, kind.split()[0]
    gate_up = weight_of(kind, dtype, num_experts, 2 * inner, hidden)
    down = weight_of(kind, dtype, num_experts, hidden, inner)
    more: dict[str, Any] = {"activation": "swiglu_oai" if name == "mxfp4" else "silu"}
    if "bias" in kind:
        more["gate_up_bias"] = torch.randn(num_experts, 2 * inner).to(dtype)
        more["down_bias"] = torch.randn(num_experts, hidden).to(dtype)
    experts = experts_of(gate_up, down, k, **more)
    experts = type(experts)(**{**vars(experts), "hidden_size": hidden, "intermediate_size": inner})
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.stack([torch.randperm(num_experts)[:k] for _ in range(tokens)])
    weights, residual = torch.rand(tokens, k), torch.randn(tokens, hidden).to(dtype)
    call = MixtureCall(Picked(ids, weights), residual=residual)
    own: ExpertsKernels[Any] = ExpertsKernels(name, MixtureKernels(PlainKernels(GemmDevice(ops))))
    found = own(x, experts, call)
    assert_close(found, by_torch(x, experts, call, name))
    if tokens <= CPU_ROWS:
        alone = own(x[-1:], experts, MixtureCall(Picked(ids[-1:], weights[-1:]), residual=residual[-1:]))
        assert torch.equal(alone, found[-1:])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To what rounding in between costs in the format of activations."""
    step = 2e-2 if found.dtype == torch.bfloat16 else 4e-3
    assert found.dtype == expected.dtype
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=step * largest)
