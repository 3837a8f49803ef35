"""Kernels of an installed vLLM for 4-bit weights, without a GPU: whether its library is taken, which layout a weight
gets, and what is done where there is none."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall
from minisgl_backend.kernels.linear.int4.reference import Int4Weight
from minisgl_backend.kernels.linear.int4.repacked import LAYOUTS, fitting_layouts, layout_of, open_layout, trial_error
from minisgl_backend.kernels.linear.kernels import GemmDevice, LinearKernels
from minisgl_backend.kernels.linear.libraries import vllm as vllm_library
from minisgl_backend.kernels.select import select_kernels
from minisgl_backend.kernels.torch_ops import TorchOps
from minisgl_backend.weights.int4 import Int4Factory
from minisgl_backend.weights.method import LinearOutput, LinearSpec
from minisgl_backend.weights.schemes.int4 import Int4Scheme
from tests.unit.kernels.int4_weights import random_weight, relative
from tests.unit.kernels.machete_reference import MacheteReference
from tests.unit.kernels.marlin_reference import MarlinReference

CPU, BF16, FP16 = torch.device("cpu"), torch.bfloat16, torch.float16
OPERATORS: Mapping[str, Any] = MappingProxyType({"machete": MacheteReference(), "marlin": MarlinReference()})


class _Given:
    """Instead of `vllm_library.operators`."""

    def __init__(self, operators: Any) -> None:
        self._operators = operators

    def __call__(self, kernel: str) -> Any:
        return self._operators


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    vllm_library.operators.cache_clear()
    open_layout.cache_clear()
    yield
    vllm_library.operators.cache_clear()
    open_layout.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed vllm, which must not be imported."""
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_no_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm_library, "PACKAGE", "a_package_that_is_not_there")
    with caplog.at_level(logging.INFO):
        assert not vllm_library.is_installed()
        assert vllm_library.operators("marlin") is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "it has no file _C_stable_libtorch.abi3.so"), (b"no library", "invalid ELF header|file too short")],
)
def test_a_library_that_is_not_taken(
    content: bytes | None, reason: str, package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        (package / vllm_library.LIBRARY).write_bytes(content)
    assert vllm_library.is_installed() == (content is not None)
    for _ in range(2):
        for name in LAYOUTS:
            assert open_layout(name, CPU, BF16, False) is None
    assert len(caplog.records) == len(LAYOUTS)
    for record in caplog.records:
        assert vllm_library.REMEDY in record.getMessage()
        assert re.search(reason, record.getMessage())
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("kernel", "known", "older"),
    [
        ("marlin", ", bool is_a_8bit", ""),
        ("machete", "ScalarType? group_scales_type", "ScalarType group_scales_type"),
    ],
)
def test_operators_of_another_version(kernel: str, known: str, older: str) -> None:
    signatures = vllm_library.SIGNATURES[kernel]
    first, last = signatures
    found = {}
    for name, kept in {
        "known": signatures,
        "older": {**signatures, first: signatures[first].replace(known, older)},
        "without": {first: signatures[first]},
    }.items():
        library = torch.library.Library(f"minisgl_{kernel}_{name}", "DEF")
        for operator, signature in kept.items():
            library.define(operator + signature)
        found[name] = vllm_library.unknown_operators(f"minisgl_{kernel}_{name}", kernel)
    assert found["known"] is None
    assert str(found["older"]).startswith(f"{first} has other arguments: minisgl_{kernel}_older::")
    assert found["without"] == f"it has no operator {last}"


class _Wrong(MarlinReference, MacheteReference):
    def marlin_gemm(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        return super().marlin_gemm(*arguments) * 1.1

    def machete_mm(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        """One tile is wrong."""
        return super().machete_mm(*arguments) * (1.1 if arguments[-1].startswith("128x256") else 1)


class _Failing(MarlinReference, MacheteReference):
    def marlin_gemm(self, *arguments: Any) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("no kernel image is available")

    machete_mm = marlin_gemm  # type: ignore[assignment]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("zeros", [False, True])
def test_the_trial(zeros: bool, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert trial_error(LAYOUTS[name].repacker(OPERATORS[name], CPU), CPU, BF16, zeros) < 6e-3
    for operators, reason in ((_Wrong(), "is wrong by 0.1"), (_Failing(), "no kernel image")):
        monkeypatch.setattr(vllm_library, "operators", _Given(operators))
        open_layout.cache_clear()
        caplog.clear()
        assert open_layout(name, CPU, BF16, zeros) is None
        assert reason in caplog.text


@pytest.mark.parametrize(
    ("facts", "shape", "group", "expected"),
    [
        ("h100", (128, 256), 64, "machete"),
        ("h100", (64, 256), 64, "marlin"),
        ("h100", (128, 256), 32, "marlin"),
        ("a100", (128, 256), 64, "marlin"),
        ("h100", (96, 256), 64, None),
    ],
)
def test_the_layout_that_a_weight_gets(
    facts: str, shape: tuple[int, int], group: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_library, "operators", _Given(None))
    weight = random_weight(*shape, group=group, zeros=True, dtype=BF16)
    assert layout_of(weight, CPU, DeviceFacts.named(facts)) is None
    open_layout.cache_clear()
    monkeypatch.setattr(vllm_library, "operators", OPERATORS.__getitem__)
    found = layout_of(weight, CPU, DeviceFacts.named(facts))
    assert (found is None) == (expected is None)
    if found is not None:
        repacked = found[1].repack(weight)
        assert repacked is not None
        assert repacked.layout == expected


@pytest.mark.parametrize(
    ("kind", "device", "launched"),
    [("gated norm", "a100", "marlin"), ("bias residual", "h100", "machete_128x32")],
)
def test_which_kernel_is_launched(kind: str, device: str, launched: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have neither norm nor epilogue; these come before and after them."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels compiled")
    pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")
    from minisgl_backend.kernels.triton_ops import TritonOps

    monkeypatch.setattr(vllm_library, "operators", OPERATORS.__getitem__)
    facts = replace(DeviceFacts.named(device), dependent_launch=False)
    kernels = LinearKernels("int4", GemmDevice(TritonOps(CPU, facts=facts), CPU))
    weight = random_weight(128, 256, group=64, zeros=True, dtype=FP16)
    found = layout_of(weight, CPU, facts)
    assert found is not None
    assert found[0] is LAYOUTS[launched.partition("_")[0]]
    second = found[1].repack(weight)
    weight, calls = replace(weight, repacked=second), []
    x = torch.randn(20, 256, dtype=FP16)
    options: dict[str, Any] = {}
    if "norm" in kind:
        options |= {"norm_weight": torch.rand(256).to(FP16), "eps": 1e-6, "activation": "silu"}
    else:
        options |= {"bias": torch.randn(128, dtype=FP16), "residual": torch.randn(20, 128, dtype=FP16)}
    multiply = type(second).linear
    monkeypatch.setattr(type(second), "linear", lambda *of: calls.append(of[-1]) or multiply(*of))
    expected = LinearKernels("int4", GemmDevice(TorchOps())).linear(
        x, weight, GemmCall(**{key: value.clone() if key == "residual" else value for key, value in options.items()})
    )
    assert relative(kernels.linear(x, weight, GemmCall(**options)), expected) < 3e-3
    assert calls == [launched]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act_order", [False, True])
def test_a_method_holds_its_weight_twice(act_order: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are in the order of the first layout."""
    scheme = Int4Scheme(layout="gptq", group=64, symmetric=False, act_order=act_order)
    spec = LinearSpec(
        outputs=(LinearOutput(name="one", size=128, start=0, local=128),), input_size=256, local_inputs=256
    )
    method = Int4Factory(select_kernels(TorchOps(), CPU), BF16, CPU, scheme).linear(spec)
    generator = torch.Generator().manual_seed(0)
    method.fill_with_noise(generator)
    if method.group_of_input is not None:
        method.group_of_input.data.copy_(torch.randperm(256, generator=generator)[None] // 64)
    method.process_weights_after_loading()
    assert fitting_layouts(method.operand) == ("machete", "marlin")
    assert method.repacked_bytes() == 0  # no kernels are there
    assert method.add_repacked() is None
    taken = []

    def linear(x: torch.Tensor, weight: Int4Weight, call: GemmCall) -> torch.Tensor:
        assert weight.repacked is not None
        taken.append(weight)
        return weight.repacked.linear(x, weight.repacked.kernels[0])

    repacker = LAYOUTS[layout].repacker(OPERATORS[layout], CPU)
    monkeypatch.setattr("minisgl_backend.weights.int4.layout_of", lambda *of: (LAYOUTS[layout], repacker))
    monkeypatch.setattr(method._int4, "linear", linear)
    assert method.add_repacked() == layout
    assert torch.equal(method.apply_weights(torch.eye(256, dtype=BF16)), method.dequantized().t())
    assert len(taken) == 1
