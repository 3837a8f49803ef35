"""Which kernels ask the driver for shared memory when Triton loads them."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from minisgl_backend.kernels import carveout, triton_ops  # noqa: E402
from minisgl_backend.kernels import elementwise as fused  # noqa: E402
from minisgl_backend.kernels.attention import decode as decode_attention  # noqa: E402
from minisgl_backend.kernels.linear.plain import small_rows as small_linear  # noqa: E402
from minisgl_backend.kernels.linear.plain import vector  # noqa: E402
from minisgl_backend.kernels.lora import few_rows  # noqa: E402
from minisgl_backend.kernels.sampling import launch as sampling  # noqa: E402
from minisgl_backend.kernels.select import select_ops  # noqa: E402
from minisgl_backend.kernels.torch_ops import TorchOps  # noqa: E402


def test_kernels_of_a_decode_step_are_loaded_with_the_largest_share(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[object] = []
    hook = SimpleNamespace(add=lambda one: hooks.append(one))
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(runtime=SimpleNamespace(kernel_load_end_hook=hook)))
    carveout.prefer_shared_memory()
    asked: list[tuple[int | None, int, int]] = []
    driver = SimpleNamespace(cuFuncSetAttribute=lambda kernel, name, value: asked.append((kernel.value, name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    (on_load,) = hooks
    for handle, kernel in enumerate(("decode_kernel", "_moe_kernel", "sample_kernel"), start=1):
        on_load(None, handle, kernel, None, "")  # type: ignore[operator]
    assert asked == [(1, 9, 100), (3, 9, 100)]


def test_these_kernels_are_there() -> None:
    modules = (decode_attention, few_rows, fused, sampling, small_linear, vector)
    assert all(any(hasattr(module, name) for module in modules) for name in carveout.KERNELS)


@pytest.mark.parametrize(("is_mixture", "hidden_size"), [(False, 1024), (True, None)])
def test_mixtures_do_without(is_mixture: bool, hidden_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def noted(device: torch.device, hidden_size: int | None = None) -> TorchOps:
        made.append(hidden_size)
        return TorchOps()

    monkeypatch.setattr(triton_ops, "TritonOps", noted)
    select_ops(torch.device("cuda"), 1024, torch.bfloat16, is_mixture=is_mixture)
    assert made == [hidden_size]


@pytest.mark.parametrize("knobs", [None, SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=None))])
def test_an_older_triton_is_left_alone(knobs: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "knobs", knobs)
    carveout.prefer_shared_memory()
