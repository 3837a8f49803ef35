"""Whether weights are held a second time, for a library's kernel."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.kernels.device_facts import DeviceFacts
from minisgl_backend.kv.pool import bytes_per_page
from minisgl_backend.models.build import attention_spec
from minisgl_backend.runner.start import memory, repacked
from minisgl_backend.runner.start.memory import memory_of
from minisgl_backend.runner.start.repacked import repack_weights, room_for_repacked
from minisgl_backend.weights.int4 import Int4LinearMethod
from minisgl_backend.weights.method import LinearMethod, LinearOutput, LinearSpec
from minisgl_backend.weights.parts import WeightPart
from tests.parity.checkpoints import save_checkpoint
from tests.parity.int4_files import write_int4
from tests.parity.paged import PagedModel
from tests.unit.runner.test_build import runtime_for


class _Weight(LinearMethod):
    def __init__(self, size: int) -> None:
        super().__init__(LinearSpec(outputs=(), input_size=1, local_inputs=1))
        self.size, self.added = size, 0

    def repacked_bytes(self) -> int:
        return self.size

    def add_repacked(self) -> str:
        self.added += 1
        return "machete"

    def parts_of(self, output: LinearOutput, rows: slice, index: int) -> list[WeightPart]:
        return []


@pytest.mark.parametrize(
    ("room", "added", "said"),
    [
        (3 << 30, 1, r"held in the layout of machete \(2\) as well: 1.0 GiB"),
        ((3 << 30) - 3, 0, "not held .* of the 3.0 GiB"),
    ],
)
def test_all_of_them_or_none(room: int, added: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = nn.ModuleList([_Weight(1 << 29), _Weight(0), nn.Linear(1, 1), _Weight(1 << 29)])
    with caplog.at_level(logging.INFO):
        repack_weights(weights.modules(), room)
    assert [one.added for one in weights if isinstance(one, _Weight)] == [added, 0, added]
    (record,) = caplog.records
    assert re.search(said, record.getMessage())


def test_nothing_is_said_of_models_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        repack_weights([_Weight(0)], 1 << 40)
    assert not caplog.records


def test_the_room(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what was free, less the weights, less the pages that were asked for."""
    runtime, model = runtime_for(tiny_model_dir, memory_ratio=0.5, num_pages=7)
    spec = attention_spec(
        model,
        AttentionSpec(page_size=16, max_seq_len=256, max_rows=5, dtype=torch.float32, device=torch.device("cpu")),
        tp_size=1,
    )
    page = bytes_per_page(spec.places, 16)
    monkeypatch.setattr(repacked, "free_bytes", lambda device: 900 * page)
    assert room_for_repacked(runtime, spec, spec.places, 1000 * page) == (500 - 100 - 7) * page


@pytest.mark.parametrize(("name", "variant"), [("llama-bias-mha", "ct"), ("qwen3_moe", "awq")])
def test_what_a_check_counts(name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers with 4 bits, where the GPU has the kernel, and memory has the room."""
    save_checkpoint(name, tmp_path / "source")
    write_int4(tmp_path / "source", variant, tmp_path / "model", tmp_path / "plain")
    runtime, config = runtime_for(tmp_path / "model")
    assert memory_of(runtime, config).repacked == 0
    monkeypatch.setattr(DeviceFacts, "of", lambda device: DeviceFacts.named("h100"))
    methods = [
        one for one in PagedModel(tmp_path / "model", page_size=16).model.modules() if isinstance(one, Int4LinearMethod)
    ]
    expected = sum(math.prod(one.spec.shape) // 2 for one in methods)
    assert memory_of(runtime, config).repacked == expected > 0
    weights = memory_of(runtime, config).weights
    monkeypatch.setattr(memory, "free_bytes", lambda device: weights + 2 * expected)
    assert memory_of(runtime, config).repacked == 0
