"""The choice among kernels of libraries and ours, without a GPU: what is measured, preferred and remembered."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.linear.call import GemmCall, LinearKey, WeightKind
from minisgl_backend.kernels.linear.choose import LinearChooser
from minisgl_backend.kernels.linear.tuning import measured
from minisgl_backend.kernels.linear.tuning.measured import KernelTuner, rows_to_measure

H200 = DeviceFacts.named("h200")
SHAPE = (256, 512)


class FakeStream:
    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def recover(self) -> None: ...

    def randn(self, rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)


class FakeTimer:
    """Microseconds by kernel."""

    times: ClassVar[dict[str, float]] = {}
    measured: ClassVar[list[str]] = []

    def __init__(self, calls: list[Any]) -> None:
        kernel = calls[0].args[0]
        self.median = self.times[kernel]
        FakeTimer.measured.append(kernel)

    def again(self) -> None: ...


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "GraphTimer", FakeTimer)
    monkeypatch.setattr(FakeTimer, "measured", [])
    monkeypatch.setattr(FakeTimer, "times", {"fp8_few_rows": 10.0, "scaled_mm": 9.0, "sgl_scaled_mm": 8.0})


class FakeWeight:
    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers, self.kind = numbers, WeightKind.of(numbers)


def multiply(kernel: str, x: torch.Tensor, weight: FakeWeight, call: GemmCall) -> torch.Tensor:
    transposed = weight.numbers.t()
    out = x @ transposed if call.residual is None else call.residual.addmm_(x, transposed)
    return out if call.activation is None else out[:, : weight.kind.size_out // 2]


def asked(*rows: int, **more: Any) -> LinearChooser:
    """As a trial step with so many rows leaves it."""
    chooser = LinearChooser("fp8", H200)
    for count in rows:
        chooser.kernel(key(count, **more))
    return chooser


def key(rows: int, **more: Any) -> LinearKey:
    return LinearKey(rows, *SHAPE, torch.bfloat16, **{"residual": True, **more})


def tune(chooser: LinearChooser, path: Path | None = None, rows: tuple[int, ...] = (1, 48), **more: Any) -> KernelTuner:
    tuner = KernelTuner(FakeStream(), H200, path, more.pop("budget_s", 1000.0))  # type: ignore[arg-type]
    weights = [FakeWeight(torch.randn(*SHAPE).bfloat16() / 16) for _ in range(2)]
    kernels = SimpleNamespace(chooser=chooser, multiply=more.pop("multiply", multiply))
    tuner.tune(kernels, weights, rows, more.pop("longest", 512))
    return tuner


def test_numbers_of_rows_that_are_measured() -> None:
    assert rows_to_measure([1, 2, 17, 48, 250], 0) == [16, 32, 64, 256]
    assert rows_to_measure([], 600) == [32, 64, 128, 256, 512, 1024]
    assert rows_to_measure([300], 100_000)[-1] == 8192


def test_the_fastest_is_preferred_in_what_it_contends_for_and_remembered(tmp_path: Path) -> None:
    chooser, path = asked(1), tmp_path / "gemms.json"
    tune(chooser, path)
    kernels = [chooser.kernel(key(rows)) for rows in (17, 32, 33, 64, 65, 512, 513, 4096)]
    # 512 rows were the most that was asked for.
    assert kernels == ["fp8_few_rows"] * 2 + ["sgl_scaled_mm"] * 4 + ["scaled_mm"] * 2
    assert chooser.kernel(key(64, residual=False)) == "fp8_few_rows"  # no layer asks for that
    ((kind, choices),) = json.loads(path.read_text()).items()
    assert kind.startswith("NVIDIA H200 fp8 256x512 torch.bfloat16 residual torch 2")
    assert " sgl_kernel " in kind
    assert choices == dict.fromkeys(("64", "128", "256", "512"), "sgl_scaled_mm")
    count = len(FakeTimer.measured)
    again = asked(1)
    tune(again, path)
    assert again.kernel(key(64)) == "sgl_scaled_mm"
    assert len(FakeTimer.measured) == count


def test_each_variant_that_layers_ask_for_is_measured() -> None:
    chooser = asked(1)
    chooser.kernel(key(1, residual=False, activation="silu", norm=True))
    tune(chooser, rows=(64,), longest=0)
    assert FakeTimer.measured == ["fp8_few_rows", "scaled_mm", "sgl_scaled_mm"] * 2
    tune(LinearChooser("fp8", H200))  # none was
    assert len(FakeTimer.measured) == 6


def test_a_small_gain_is_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakeTimer, "times", {"fp8_few_rows": 10.0, "scaled_mm": 9.85, "sgl_scaled_mm": 9.75})
    chooser, path = asked(1), tmp_path / "gemms.json"
    tune(chooser, path)
    assert [chooser.kernel(key(rows)) for rows in (64, 512)] == ["fp8_few_rows", "scaled_mm"]
    assert set(*map(dict.values, json.loads(path.read_text()).values())) == {"fp8_few_rows", "scaled_mm"}


def test_a_kernel_with_other_numbers_or_that_fails_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    def broken(kernel: str, x: torch.Tensor, weight: FakeWeight, call: GemmCall) -> torch.Tensor:
        if kernel == "scaled_mm":
            raise ImportError("libnuma.so.1: cannot open shared object file")
        return multiply(kernel, x, weight, call) * (1.1 if kernel == "sgl_scaled_mm" else 1.0)

    chooser = asked(1)
    tune(chooser, multiply=broken, rows=(64,), longest=0)
    assert chooser.kernel(key(64)) == "fp8_few_rows"
    assert "sgl_scaled_mm is not taken for 256x512 torch.bfloat16 residual: fp8_few_rows has other" in caplog.text


def test_what_there_is_no_time_for_is_as_the_table_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chooser, path = asked(1), tmp_path / "gemms.json"
    with caplog.at_level("INFO"):
        tune(chooser, path, budget_s=-1.0)
    assert chooser.kernel(key(64)) == "fp8_few_rows"
    assert FakeTimer.measured == []
    assert not path.exists()
    assert "no time is left for measuring kernels" in caplog.text
    tune(chooser, path)
    assert chooser.kernel(key(64)) == "sgl_scaled_mm"


def test_memory_that_is_missing_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def out_of_memory(kernel: str, x: torch.Tensor, *_: Any) -> torch.Tensor:
        if len(x) > 64:
            raise torch.OutOfMemoryError("tried to allocate 1 GiB")
        return multiply(kernel, x, *_)

    chooser = asked(1)
    tune(chooser, multiply=out_of_memory)
    assert [chooser.kernel(key(rows)) for rows in (64, 128)] == ["sgl_scaled_mm", "scaled_mm"]
    assert "is not measured: tried to allocate 1 GiB" in caplog.text


def test_a_library_that_broke_since_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gemms.json"
    tune(asked(1), path)

    def broken(kernel: str, *given: Any) -> torch.Tensor:
        if kernel == "sgl_scaled_mm":
            raise OSError("undefined symbol")
        return multiply(kernel, *given)

    chooser = asked(1)
    tune(chooser, path, multiply=broken)
    assert chooser.kernel(key(64)) == "scaled_mm"
    assert "sgl_scaled_mm was measured fastest for 256x512" in caplog.text
    assert json.loads(path.read_text()).popitem()[1]["64"] == "scaled_mm"


def test_without_libraries_torchs_and_ours_contend() -> None:
    alone = replace(H200, libraries=frozenset())
    chooser = LinearChooser("fp8", alone)
    assert chooser.contenders(key(64, residual=False)) == ("fp8_few_rows", "scaled_mm")
    assert chooser.contenders(key(64)) == ("fp8_few_rows", "scaled_mm", "fp8_cublaslt")
    assert chooser.contenders(key(65, residual=False)) == ()
    assert chooser.kernel(key(65, block=(128, 128))) == "fp8_many_rows"  # nor is torch for CUDA 12.9


def test_choices_are_measured_anew_where_any_kernel_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one of attention or of experts: what runs beside a GEMM has a part in what is fastest."""
    (tmp_path / "moe").mkdir()
    source = tmp_path / "moe" / "one.py"
    monkeypatch.setattr("minisgl_backend.kernels.__path__", [str(tmp_path)])
    digests = []
    for text in ("before", "after"):
        source.write_text(text)
        digests.append(measured.sources_digest.__wrapped__())
    assert len(set(digests)) == 2
