"""Code that cannot be captured is found by a trial, told of, and runs without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minisgl_backend.runner.graphs.whole import EagerGraphRunner
from minisgl_backend.runner.model_runner import Captures
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

    class Trial:
        def runner(self, num_pages: int, captures: Captures) -> None:
            assert captures.graphs is graphs
            assert captures.pieces is None
            if error is not None:
                raise error

    parts: Any = Trial()
    assert can_be_captured("Gemma3nForCausalLM", parts, Captures(graphs)) == (error is None)
    assert graphs.is_closed
    assert ("Gemma3nForCausalLM" in caplog.text) == (error is not None)
    assert told in caplog.text


def test_memory_that_is_too_small_is_no_reason() -> None:
    class Trial:
        def runner(self, num_pages: int, captures: Captures) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    parts: Any = Trial()
    with pytest.raises(torch.OutOfMemoryError):
        can_be_captured("Gemma3nForCausalLM", parts, Captures())
