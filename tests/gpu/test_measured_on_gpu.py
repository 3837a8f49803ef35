"""Kernels that are measured against each other: all of them give the same numbers, those that were preferred under
graphs, too, and the second start measures nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.linear.fp8_torch import FP8, Fp8Kernels, Fp8Weight, dequantize, quantize_outputs
from minisgl_backend.kernels.linear.int8 import Int8Kernels, Int8Weight
from minisgl_backend.kernels.linear.int8 import quantize_tokens as to_int8
from minisgl_backend.kernels.linear.plain.reference import TorchPlainKernels
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


def operands(rows: int, variant: dict[str, Any]) -> dict[str, Any]:
    size_out, size_in = SIZES
    made = {
        "norm_weight": torch.rand(size_in, device="cuda").bfloat16() + 0.5,
        "bias": torch.randn(size_out, device="cuda").bfloat16(),
        "residual": torch.randn(rows, size_out, device="cuda").bfloat16(),
    }
    return {name: made[name] if given is True else given for name, given in variant.items()} | {"eps": 1e-6}


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
    from minisgl_backend.kernels.linear.fp8 import TritonFp8Kernels
    from minisgl_backend.kernels.linear.plain.gpu import TritonPlainKernels
    from minisgl_backend.kernels.triton_ops import TritonOps

    device = torch.device("cuda")
    plain = TritonPlainKernels(TritonOps(device), device)
    if weight_format == "int8":
        return Int8Kernels(plain, device), Int8Kernels(TorchPlainKernels(TorchOps()), device), int8_weights()
    return TritonFp8Kernels(plain, device), Fp8Kernels(TorchOps()), fp8_weights(weight_format == "fp8-blocks")


@pytest.mark.parametrize("weight_format", ["fp8", "fp8-blocks", "int8"])
def test_contenders_and_choices(weight_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ours, reference, weights = kernels(weight_format)
    named = [dict(zip(("weight", *one._fields[1:]), one, strict=True)) for one in weights]
    x = torch.randn(300, SIZES[1], device="cuda").bfloat16()
    for variant in VARIANTS:  # as a trial step does
        ours.linear(x, **named[0], **operands(300, variant))
    ours.prepare_linear(weights, ROWS, 300)
    asked = ours._chooser.asked(*SIZES)
    assert len(asked) == len(VARIANTS)
    for rows in ROWS:
        for variant, key in zip(VARIANTS, asked, strict=True):
            given = operands(rows, variant)
            kept = {name: value.clone() if name == "residual" else value for name, value in given.items()}
            expected = reference.linear(x[:rows], **named[1], **kept)
            blank = dict.fromkeys(("norm_weight", "bias", "residual", "activation"))
            for kernel in ours._chooser.contenders(key._replace(rows=rows)):
                if kernel.startswith("sgl"):
                    pytest.importorskip("sgl_kernel")
                kept = {name: value.clone() if name == "residual" else value for name, value in given.items()}
                found = ours.multiply(kernel, x[:rows], weights[1], **{**blank, **kept})
                assert relative(found, expected) < 1e-2, (kernel, rows, variant)
            residual = given.pop("residual", None)
            scratch = None if residual is None else residual.clone()
            ours.linear(x[:rows], **named[1], residual=scratch, **given)
            graph = torch.cuda.CUDAGraph()
            if scratch is not None and residual is not None:
                scratch.copy_(residual)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                found = ours.linear(x[:rows], **named[1], residual=scratch, **given)
            graph.replay()
            assert relative(found, expected) < 1e-2, (rows, variant)


def test_the_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    choices = []
    for _ in range(2):
        ours, _, weights = kernels("fp8")
        ours.linear(torch.randn(64, SIZES[1], device="cuda").bfloat16(), weights[0].numbers, weights[0].scale)
        started = time.monotonic()
        ours.prepare_linear(weights, ROWS, 300)
        seconds = time.monotonic() - started
        choices.append((tmp_path / "minisgl" / "gemms.json").read_text())
    assert choices[0] == choices[1]
    assert seconds < 0.2
    ((kind, chosen),) = json.loads(choices[0]).items()
    assert kind.startswith(f"{torch.cuda.get_device_name()} fp8 2048x1536 torch.bfloat16 torch ")
    assert "64" in chosen
