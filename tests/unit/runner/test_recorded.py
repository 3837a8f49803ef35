"""Recorded decode steps that do not repeat themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl_backend.kernels.cpu.library import cpu_library
from minisgl_backend.kernels.cpu.ops import CpuOps
from minisgl_backend.runner.graphs.recorded import RecordedGraphRunner
from minisgl_backend.runner.graphs.whole import DecodeParts


@pytest.mark.skipif(cpu_library() is None, reason="no compiled kernels here")
def test_a_step_that_does_not_repeat_itself_is_computed_again() -> None:
    library = cpu_library()
    assert library is not None
    ops, unseen = CpuOps(library), library.minisgl_rms_norm
    x, weight, stored = torch.randn(4, 64).bfloat16(), torch.ones(64).bfloat16(), torch.zeros(4, 64).bfloat16()

    def logits(*_: Any) -> torch.Tensor:
        out = torch.empty_like(x)
        unseen(0, x.data_ptr(), weight.data_ptr(), 1e-5, 4, 64, out.data_ptr())
        stored.copy_(out)  # keys and values of its tokens
        return ops.rms_norm(out, weight, 1e-5)

    expected, expected_stored = logits(), stored.clone()
    stored.zero_()
    runner = RecordedGraphRunner((1, 4))
    sample: Any = lambda _, logits: logits  # noqa: E731
    steps: Any = SimpleNamespace(parts=DecodeParts(logits, sample))
    anything: Any = SimpleNamespace(plan=lambda *_: None)
    runner.capture(steps, anything, anything)
    runner.plan_replay(anything)
    with torch.inference_mode():
        for size in (4, 1, 4):
            found: Any = runner.replay(size)
            assert torch.equal(found, expected)
            assert torch.equal(stored, expected_stored)
            stored.zero_()
    assert not runner._recorded, "none is recorded from then on"
