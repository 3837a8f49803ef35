"""What a decode step moves of states, counted while the kernels run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.recurrent import RecurrentRows

if torch.cuda.is_available():
    pytest.skip("Triton's interpreter is off where there is a GPU", allow_module_level=True)
pytest.importorskip("triton", reason="pip install triton; tests/conftest.py turns its interpreter on")

from triton.runtime import interpreter

from benchmarks.model_shapes import SHAPES
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kernels.recurrent.choose import recurrent_kernels
from minisgl_backend.models.config import ModelConfig

PAGE = 32  # as default on a GPU
TAILS = (1, 15, 29)  # tokens behind a row's border: 15 on average
SHARE = 16  # of the heads are counted


class Moved:
    """Distinct bytes of a pool's tensors that launches read, and those that they write."""

    def __init__(self, rows: RecurrentRows, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ranges = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in rows.pool.stacks[0]]
        self._seen: dict[str, list[Any]] = {}
        builder = interpreter.InterpreterBuilder
        for kind in ("load", "store"):
            self._watch(builder, kind, monkeypatch)

    def _watch(self, builder: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        run = getattr(builder, f"create_masked_{kind}")

        def noted(one: Any, pointers: Any, *given: Any) -> Any:
            mask = given[0] if kind == "load" else given[1]
            addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].ravel()
            width = pointers.get_element_ty().primitive_bitwidth // 8
            self._seen.setdefault(kind, []).append((addresses, width))
            return run(one, pointers, *given)

        monkeypatch.setattr(builder, f"create_masked_{kind}", noted)

    def by(self, launch: Callable[[], Any]) -> int:
        self._seen = {}
        launch()
        total = 0
        for found in self._seen.values():
            for width in {width for _, width in found}:
                addresses = np.unique(np.concatenate([each for each, one in found if one == width]))
                ours = sum(((addresses >= low) & (addresses < high)).sum() for low, high in self._ranges)
                total += width * int(ours)
        return total


def bytes_of_a_step(num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of one layer of Qwen3.5-9B and one row, whose drafts are all right, so that it folds as often as can be."""
    config = ModelConfig.from_dicts(SHAPES["qwen3.5-9b-text"], {})
    whole = next(layer.mixer.state for layer in config.layers if layer.mixer.state is not None)
    rows = RecurrentRows(
        whole.share(SHARE),
        num_rows=len(TAILS),
        page_size=PAGE,
        max_drafts=num_drafts,
        dtype=torch.float16,  # as wide as bfloat16, of which the interpreter has no products
        state_dtype=torch.float32,
        ops=recurrent_kernels(DeviceFacts.named("h100")),
    )
    rows.prefill({row: PAGE + tail for row, tail in enumerate(TAILS)})
    with monkeypatch.context() as change:
        moved = Moved(rows, change)
        window = moved.by(lambda: rows.decode(dict.fromkeys(range(len(TAILS)), num_drafts))) / len(TAILS)
        rows.lengths = [2 * PAGE] * len(TAILS)
        fold = moved.by(rows.fold) / len(TAILS)
    return SHARE * (window + fold * (1 + num_drafts) / PAGE)


def test_drafts_cost_hardly_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    state = 4 * 32 * 128 * 128
    plain, drafts = (bytes_of_a_step(count, monkeypatch) for count in (0, 3))
    assert state < plain < 1.3 * state
    assert drafts < 1.3 * plain
