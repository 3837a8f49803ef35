"""Code that cannot be captured is found by a trial, told of, and runs without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.runner.graphs.whole import EagerGraphRunner
from minisgl_backend.runner.start.capturable import can_be_captured


class Graphs(EagerGraphRunner):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, ""),
        (
            RuntimeError("Cannot copy between CPU and CUDA tensors\nat line 3"),
            "(Cannot copy between CPU and CUDA tensors)",
        ),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_a_trial_tells_why(error: Exception | None, told: str, caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs((1,))

    def runner_with(num_pages: int, **captures: Any) -> Any:
        assert captures == {"graphs": graphs, "pieces": None}
        if error is not None:
            raise error

    assert can_be_captured("Gemma3nForCausalLM", runner_with, graphs, None) == (error is None)
    assert graphs.is_closed
    assert ("Gemma3nForCausalLM" in caplog.text) == (error is not None)
    assert told in caplog.text


def test_memory_that_is_too_small_is_no_reason() -> None:
    def runner_with(num_pages: int, **captures: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        can_be_captured("Gemma3nForCausalLM", runner_with, None, None)
