"""Kernels that are measured against each other: all of them give the same numbers, those that were preferred under
graphs, too, and the second start measures nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.fp8.reference import FP8, Fp8Weight, dequantize, quantize_outputs
from minisgl_backend.kernels.linear.int8 import Int8Weight
from minisgl_backend.kernels.linear.int8 import quantize_tokens as to_int8
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
    ),
]

ROWS = (1, 40, 64, 100, 300)
SIZES = (2048, 1536)
VARIANTS: tuple[dict[str, Any], ...] = (
    {}, {"norm_weight": True, "activation": "silu"}, {"residual": True}, {"bias": True, "norm_weight": True},
)  # fmt: skip


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def operands(rows: int, variant: dict[str, Any]) -> GemmCall:
    size_out, size_in = SIZES
    made = {
        "norm_weight": torch.rand(size_in, device="cuda").bfloat16() + 0.5,
        "bias": torch.randn(size_out, device="cuda").bfloat16(),
        "residual": torch.randn(rows, size_out, device="cuda").bfloat16(),
    }
    return GemmCall(eps=1e-6, **{name: made[name] if given is True else given for name, given in variant.items()})


def again(call: GemmCall) -> GemmCall:
    """With a residual of its own, which may be overwritten."""
    return call._replace(residual=None if call.residual is None else call.residual.clone())


def fp8_weights(in_blocks: bool) -> list[Fp8Weight]:
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        weight = torch.randn(*SIZES, device="cuda") / 40
        if in_blocks:
            scale = torch.rand(SIZES[0] // 128, SIZES[1] // 128, device="cuda") / 2000 + 1e-4
            whole = dequantize(torch.ones_like(weight).to(FP8), scale, (128, 128))
            made.append(Fp8Weight((weight / whole).clamp(-448, 448).to(FP8), scale, None, (128, 128)))
        else:
            made.append(Fp8Weight(*quantize_outputs(weight.bfloat16())))
    return made


def int8_weights() -> list[Int8Weight]:
    return [Int8Weight(*to_int8(torch.randn(*SIZES, device="cuda") / 40)) for _ in range(2)]


def kernels(weight_format: str) -> tuple[Any, Any, list[Any]]:
    """Ours, their reference, and weights."""
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    made = int8_weights() if weight_format == "int8" else fp8_weights(weight_format == "fp8-blocks")
    name = weight_format.partition("-")[0]
    return LinearKernels(name, GemmDevice(TritonOps(device), device)), LinearKernels(name, GemmDevice(TorchOps())), made


@pytest.mark.parametrize("weight_format", ["fp8", "fp8-blocks", "int8"])
def test_contenders_and_choices(weight_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ours, reference, weights = kernels(weight_format)
    x = torch.randn(300, SIZES[1], device="cuda").bfloat16()
    for variant in VARIANTS:  # as a trial step does
        ours.linear(x, weights[0], operands(300, variant))
    ours.prepare(weights, ROWS, 300)
    asked = ours.chooser.asked(*SIZES)
    assert len(asked) == len(VARIANTS)
    for rows in ROWS:
        for variant, key in zip(VARIANTS, asked, strict=True):
            given = operands(rows, variant)
            expected = reference.linear(x[:rows], weights[1], again(given))
            for kernel in ours.chooser.contenders(key._replace(rows=rows)):
                if kernel.startswith("sgl"):
                    pytest.importorskip("sgl_kernel")
                found = ours.multiply(kernel, x[:rows], weights[1], again(given))
                assert relative(found, expected) < 1e-2, (kernel, rows, variant)
            scratch = again(given)
            ours.linear(x[:rows], weights[1], scratch)
            graph = torch.cuda.CUDAGraph()
            if scratch.residual is not None and given.residual is not None:
                scratch.residual.copy_(given.residual)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                found = ours.linear(x[:rows], weights[1], scratch)
            graph.replay()
            assert relative(found, expected) < 1e-2, (rows, variant)


def test_the_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    choices = []
    for _ in range(2):
        ours, _, weights = kernels("fp8")
        ours.linear(torch.randn(64, SIZES[1], device="cuda").bfloat16(), weights[0])
        started = time.monotonic()
        ours.prepare(weights, ROWS, 300)
        seconds = time.monotonic() - started
        choices.append((tmp_path / "minisgl" / "gemms.json").read_text())
    assert choices[0] == choices[1]
    assert seconds < 0.2
    ((kind, chosen),) = json.loads(choices[0]).items()
    assert kind.startswith(f"{torch.cuda.get_device_name()} fp8 2048x1536 torch.bfloat16 torch ")
    assert "64" in chosen
