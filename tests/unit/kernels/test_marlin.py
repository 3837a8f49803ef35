"""vLLM's Marlin without a GPU: its layout, whether its library is taken, and what is done where it is not."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear import marlin, marlin_library
from minisgl_backend.kernels.linear.int4_torch import Int4Kernels, Int4Weight, dequantize
from minisgl_backend.kernels.linear.marlin import Marlin, fits_marlin, marlin_bytes, trial_error
from minisgl_backend.kernels.torch_ops import TorchOps, TorchPlainKernels
from minisgl_backend.weights.int4 import Int4Factory
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.schemes.int4 import Int4Scheme
from tests.unit.kernels.int4_weights import random_weight, relative
from tests.unit.kernels.marlin_reference import MarlinReference

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "zeros"),
    [(128, 384, 128, True), (64, 256, 96, False), (192, 256, 32, True), (64, 256, -1, True), (64, 384, 256, False)],
)
def test_the_layout(size_out: int, size_in: int, group: int, zeros: bool) -> None:
    """Groups larger than its largest are cut, and those of 96 inputs as well."""
    weight = random_weight(size_out, size_in, group=group, zeros=zeros, dtype=BF16)
    assert fits_marlin(weight)
    repacked = Marlin(MarlinReference(), CPU).repack(weight)
    assert repacked is not None
    found = repacked.linear(torch.eye(size_in, dtype=BF16))
    assert torch.equal(found, dequantize(weight, BF16).t())
    held = [repacked.words, repacked.scales, *([] if repacked.zeros is None else [repacked.zeros])]
    assert marlin_bytes(weight) == sum(one.numel() * one.element_size() for one in held)


@pytest.mark.parametrize(
    ("size_out", "size_in", "group", "dtype"),
    [(96, 256, 32, BF16), (64, 320, 32, BF16), (64, 128, 64, BF16), (64, 256, 16, BF16), (64, 256, 32, torch.float32)],
)
def test_what_does_not_fit(size_out: int, size_in: int, group: int, dtype: torch.dtype) -> None:
    weight = random_weight(size_out, size_in, group=group, zeros=False, dtype=dtype)
    assert not fits_marlin(weight)
    assert Marlin(MarlinReference(), CPU).repack(weight) is None


def test_a_zero_point_of_16() -> None:
    """GPTQ's first version can say so; four bits cannot."""
    weight = random_weight(64, 256, group=64, zeros=True, dtype=BF16)
    assert weight.zeros is not None
    weight.zeros[1, 7] = 16
    assert Marlin(MarlinReference(), CPU).repack(weight) is None


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    marlin_library.operators.cache_clear()
    marlin.open_marlin.cache_clear()
    yield
    marlin_library.operators.cache_clear()
    marlin.open_marlin.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed vllm, which must not be imported."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_no_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(marlin_library, "PACKAGE", "a_package_that_is_not_there")
    with caplog.at_level(logging.INFO):
        assert not marlin_library.is_installed()
        assert marlin_library.operators() is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "it has no file _C_stable_libtorch.abi3.so"), (b"no library", "invalid ELF header|file too short")],
)
def test_a_library_that_is_not_taken(
    content: bytes | None, reason: str, package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (package / marlin_library.LIBRARY).write_bytes(content)
    assert marlin_library.is_installed() == (content is not None)
    for _ in range(2):
        assert marlin.open_marlin(CPU, BF16, False) is None
    (record,) = caplog.records
    assert marlin_library.REMEDY in record.getMessage()
    assert re.search(reason, record.getMessage())
    assert "vllm" not in sys.modules


def test_operators_of_another_version() -> None:
    gemm, repack = marlin_library.SIGNATURES["marlin_gemm"], marlin_library.SIGNATURES["gptq_marlin_repack"]
    found = {}
    for name, signatures in {
        "known": {"marlin_gemm": gemm, "gptq_marlin_repack": repack},
        "older": {"marlin_gemm": gemm, "gptq_marlin_repack": repack.replace(", bool is_a_8bit", "")},
        "without": {"gptq_marlin_repack": repack},
    }.items():
        library = torch.library.Library(f"minisgl_marlin_{name}", "DEF")
        for operator, signature in signatures.items():
            library.define(operator + signature)
        found[name] = marlin_library.unknown_operators(f"minisgl_marlin_{name}")
    assert found["known"] is None
    assert str(found["older"]).startswith("gptq_marlin_repack has other arguments: minisgl_marlin_older::")
    assert found["without"] == "it has no operator marlin_gemm"


def _given(operators: MarlinReference) -> MarlinReference:
    return operators


class _Wrong(MarlinReference):
    def marlin_gemm(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        return super().marlin_gemm(*arguments) * 1.1


class _Failing(MarlinReference):
    def marlin_gemm(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("zeros", [False, True])
def test_the_trial(zeros: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert trial_error(Marlin(MarlinReference(), CPU), CPU, BF16, zeros) < 5e-3
    for operators, reason in ((_Wrong(), "is wrong by 0.1"), (_Failing(), "no kernel image")):
        monkeypatch.setattr(marlin.marlin_library, "operators", partial(_given, operators))
        marlin.open_marlin.cache_clear()
        caplog.clear()
        assert marlin.open_marlin(CPU, BF16, zeros) is None
        assert reason in caplog.text


@pytest.mark.parametrize("kind", ["gated norm", "bias residual"])
def test_which_kernel_is_launched(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marlin has neither norm nor epilogue; these come before and after it."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels compiled")
    pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")
    from minisgl_backend.kernels.linear import int4_triton
    from minisgl_backend.kernels.triton_ops import TritonOps, TritonPlainKernels

    opened = Marlin(MarlinReference(), CPU)
    monkeypatch.setattr(int4_triton, "open_marlin", lambda *of: opened)
    facts = replace(DeviceFacts.named("h100"), dependent_launch=False)
    kernels = int4_triton.TritonInt4Kernels(TritonPlainKernels(TritonOps(CPU, facts=facts), CPU), CPU)
    weight = random_weight(128, 256, group=64, zeros=True, dtype=FP16)
    assert kernels.second_layout_bytes(weight) == marlin_bytes(weight)
    weight = replace(weight, second=kernels.second_layout(weight))
    x = torch.randn(20, 256, dtype=FP16)
    options: dict[str, Any] = {}
    if "norm" in kind:
        options |= {"norm_weight": torch.rand(256).to(FP16), "eps": 1e-6, "activation": "silu"}
    else:
        options |= {"bias": torch.randn(128, dtype=FP16), "residual": torch.randn(20, 128, dtype=FP16)}
    calls = []
    monkeypatch.setattr(opened, "linear", lambda *of: calls.append(of) or Marlin.linear(opened, *of))
    expected = Int4Kernels(TorchPlainKernels(TorchOps())).linear(
        x, weight, **{key: value.clone() if key == "residual" else value for key, value in options.items()}
    )
    assert relative(kernels.linear(x, weight, **options), expected) < 3e-3
    assert len(calls) == 1


@pytest.mark.parametrize("act_order", [False, True])
def test_a_method_holds_its_weight_twice(act_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are in the order of the first layout."""
    scheme = Int4Scheme(layout="gptq", group=64, symmetric=False, act_order=act_order)
    spec = LinearSpec(outputs=(LinearOutput(name="one", size=64, start=0, local=64),), input_size=256, local_inputs=256)
    method = Int4Factory(TorchPlainKernels(TorchOps()), BF16, CPU, scheme).linear(spec)
    generator = torch.Generator().manual_seed(0)
    method.fill_with_noise(generator)
    if method.group_of_input is not None:
        method.group_of_input.data.copy_(torch.randperm(256, generator=generator)[None] // 64)
    method.process_weights_after_loading()
    assert (method.second_layout, method.second_layout_bytes()) == ("marlin", 0)  # the kernels are not there
    taken = []

    def linear(x: torch.Tensor, weight: Int4Weight, **options: Any) -> torch.Tensor:
        assert weight.second is not None
        taken.append(weight)
        return weight.second.linear(x)

    monkeypatch.setattr(method._kernels, "second_layout", Marlin(MarlinReference(), CPU).repack)
    monkeypatch.setattr(method._kernels, "linear", linear)
    method.add_second_layout()
    assert torch.equal(method.apply_weights(torch.eye(256, dtype=BF16)), method.dequantized().t())
    assert len(taken) == 1
