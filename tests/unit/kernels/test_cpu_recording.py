"""Steps that are computed again from the same memory: by kernels, by torch, and what cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from minisgl_backend.kernels.cpu import recording as module
from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import CpuOps
from minisgl_backend.kernels.cpu.recording import Recording

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no compiled kernels here")
Step = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def ops() -> CpuOps:
    library = cpu_library()
    assert library is not None
    return CpuOps(library)


def recorded(ops: CpuOps, step: Step, x: torch.Tensor) -> tuple[Recording, torch.Tensor]:
    with torch.inference_mode(), Recording(ops.library) as recording:
        out = step(x)
    return recording, out


WEIGHT = torch.linspace(0.5, 1.5, 64).bfloat16()
BIAS = torch.linspace(-1, 1, 64).bfloat16()


def in_place(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, 3] = x[:, 5]
    return out.add_(x)


STEPS: dict[str, Step] = {
    "views": lambda x: x.view(2, 2, 64).transpose(0, 1)[1],
    "in place": in_place,
    "by index": lambda x: x[torch.tensor([2, 0])] + BIAS,
    "several results": lambda x: torch.stack([*x.float().topk(3, dim=1)]),
    "joined": lambda x: torch.cat([x, *x.split(2)]).contiguous(),
    "another type, or the same": lambda x: x.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_replay_computes_what_python_does(name: str, ops: CpuOps) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return STEPS[name](ops.rms_norm(ops.rms_norm(x, WEIGHT, 1e-5), BIAS, 1e-3) + BIAS)

    x = torch.randn(4, 64).bfloat16()
    recording, out = recorded(ops, step, x)
    assert recording.refusal is None
    assert torch.equal(out, step(x))
    with torch.inference_mode():
        assert recording.repeats(out)
    for _ in range(3):
        x.normal_()
        with torch.inference_mode():
            recording.replay()
        assert torch.equal(out, step(x))


REFUSED: dict[str, Step] = {
    "a number": lambda x: x * x[0, 0].item(),
    "an integer": lambda x: x[int(x[0, 0].abs()) % 2],
    "a condition": lambda x: x if x.any() else -x,
    "numbers": lambda x: x * x[0].tolist()[0],
    "an array": lambda x: x * float(x.float().numpy()[0, 0]),
    "a mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "different numbers": lambda x: x.unique(),
    "chance": lambda x: x + torch.rand(64),
    "a comparison": lambda x: x if torch.equal(x, x) else -x,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_decides_is_refused(name: str, ops: CpuOps) -> None:
    x = torch.randn(4, 64).bfloat16()
    recording, out = recorded(ops, REFUSED[name], x)
    assert recording.refusal is not None
    assert torch.equal(out, REFUSED[name](x)) or name == "chance", "the step is computed all the same"


def test_what_is_computed_unseen_is_noticed(ops: CpuOps) -> None:
    unseen, x = ops.library.minisgl_rms_norm, torch.randn(4, 64).bfloat16()

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        unseen(0, x.data_ptr(), WEIGHT.data_ptr(), 1e-5, 4, 64, out.data_ptr())
        return ops.rms_norm(out, WEIGHT, 1e-5)

    recording, out = recorded(ops, step, x)
    assert recording.refusal is None
    assert not recording.repeats(out)


def test_functions_are_left_as_they_were(ops: CpuOps) -> None:
    before, x = ops.library.minisgl_rms_norm, torch.randn(4, 64).bfloat16()
    with pytest.raises(ZeroDivisionError), Recording(ops.library):
        ops.rms_norm(x, WEIGHT, 1 / 0)
    assert ops.library.minisgl_rms_norm is before


def test_another_threads_calls_are_its_own(ops: CpuOps) -> None:
    x, other = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    out = torch.empty_like(other)

    def step(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: out.copy_(ops.rms_norm(other, WEIGHT, 1e-5)))
        thread.start()
        thread.join()
        return ops.rms_norm(x, WEIGHT, 1e-5)

    recording, _ = recorded(ops, step, x)
    assert recording.refusal is None
    out.zero_()
    recording.replay()
    assert not out.any()


def test_replays_add_nothing(ops: CpuOps) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(ops.rms_norm(x, WEIGHT, 1e-5) + BIAS, WEIGHT, 1e-5) + BIAS

    recording, _ = recorded(ops, step, torch.randn(4, 64).bfloat16())
    kept = len(recording._kept)
    for _ in range(3):
        with torch.inference_mode():
            recording.replay()
    assert not recording._calls
    assert len(recording._kept) == kept


def test_two_threads_record_one_after_the_other(ops: CpuOps) -> None:
    before, began, ended = ops.library.minisgl_rms_norm, threading.Event(), threading.Event()
    x, other = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16()
    found: list[tuple[Recording, torch.Tensor]] = []

    def of_other(x: torch.Tensor) -> torch.Tensor:
        began.set()
        ended.wait(10)
        return ops.rms_norm(x, BIAS, 1e-5)

    thread = threading.Thread(target=lambda: found.append(recorded(ops, of_other, other)))

    def step(x: torch.Tensor) -> torch.Tensor:
        thread.start()
        assert not began.wait(0.5), "it waits"
        return ops.rms_norm(x, WEIGHT, 1e-5)

    try:
        recording, out = recorded(ops, step, x)
    finally:
        ended.set()
        thread.join()
    assert ops.library.minisgl_rms_norm is before
    with torch.inference_mode():
        assert recording.repeats(out)
        (recording, out), *_ = found
        assert recording.repeats(out)
    assert torch.equal(out, ops.rms_norm(other, BIAS, 1e-5))


def test_what_cannot_be_entered_is_left(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    before, x = ops.library.minisgl_rms_norm, torch.randn(4, 64).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr("torch.utils._python_dispatch.TorchDispatchMode.__enter__", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recorded(ops, lambda x: x, x)
    assert ops.library.minisgl_rms_norm is before
    assert not ops.library.recorded.locked()


def test_inputs_that_an_operation_returns_are_not_lost(ops: CpuOps) -> None:
    defined = torch.library.Library("minisgl_tests", "FRAGMENT")
    defined.define("with_next(Tensor x) -> (Tensor, Tensor)")
    defined.impl("with_next", lambda x: (x, x + 1), "CPU")
    x = torch.randn(4, 64).bfloat16()
    before = x.clone()
    recording, out = recorded(ops, lambda x: torch.ops.minisgl_tests.with_next(x)[1], x)
    assert recording.refusal is None
    with torch.inference_mode():
        assert recording.repeats(out)
    assert torch.equal(x, before)
    assert torch.equal(out, before + 1)


@pytest.mark.parametrize("count", [7, 8])
def test_what_takes_much_memory_is_refused(count: int, ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 64).bfloat16()
    monkeypatch.setattr(module, "LARGEST", 7 * x.nbytes)

    def step(x: torch.Tensor) -> torch.Tensor:
        for i in range(count):
            x = ops.rms_norm(x, WEIGHT, 1e-5) if i % 2 else (x + BIAS).view(4, 64)
        return x

    recording, out = recorded(ops, step, x)
    assert (recording.refusal is None) == (count == 7)
    assert torch.equal(out, step(x))
    assert bool(recording._kept) == (count == 7), "no memory is kept for nothing"
