"""How memory is split between states and pages, and what that allows is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.start import states
from minisgl_backend.runner.start.device import MachineFacts
from minisgl_backend.runner.start.resolve import resolve
from minisgl_backend.runner.start.runtime_config import RuntimeConfig
from minisgl_backend.runner.start.states import choose_states, fit_rows, least_states
from tests.parity.checkpoints import save_checkpoint

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_5")
    save_checkpoint("qwen3_5", path)
    return path


def resolved(folder: Path, **options: object) -> tuple[RuntimeConfig, ModelConfig]:
    config, model = EngineConfig(model=str(folder), **options), load_model_config(folder)  # type: ignore[arg-type]
    return resolve(config, folder, model, MachineFacts.detect(), Environment.read()), model


def test_rows_have_a_slot_each_and_the_cache_as_many_where_there_is_room(folder: Path) -> None:
    runtime, model = resolved(folder, max_running_requests=64)
    assert fit_rows(runtime, model) is runtime
    room = choose_states(runtime, model, 1 << 30)
    assert room is not None
    assert (room.num_slots, room.num_rows) == (128, 65)
    needed = room.num_bytes
    tighter = choose_states(runtime, model, 2 * needed - 20 * room.layout.bytes_per_slot)
    assert tighter is not None
    assert 64 + 16 < tighter.num_slots < 128


def test_fewer_rows_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime, model = resolved(folder, max_running_requests=64, dummy_weights=True, memory_ratio=1.0)
    least = least_states(runtime, model)
    assert least is not None
    free = 40 * (least.layout.bytes_per_slot + least.tail_bytes)
    monkeypatch.setattr(states, "free_bytes", lambda device: free)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="max_running_requests is 64; allowed"):
        choose_states(runtime, model, free)
    lowered = fit_rows(runtime, model)
    rows = lowered.config.max_running_requests
    assert 10 < rows < 20
    assert f"{rows} sequences run at a time, not max_running_requests (64)" in caplog.text
    room = choose_states(lowered, model, free)
    assert room is not None
    assert rows < room.num_slots <= 2 * rows
    assert room.num_bytes <= free // 2


def test_num_state_slots_is_what_is_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    runtime, model = resolved(folder, max_running_requests=64, num_state_slots=20)
    with caplog.at_level(logging.WARNING):
        lowered = fit_rows(runtime, model)
    assert lowered.config.max_running_requests == 20
    assert "num_state_slots is 20" in caplog.text
    room = choose_states(lowered, model, 1 << 30)
    assert room is not None
    assert room.num_slots == 20
    with pytest.raises(ConfigError, match="num_state_slots is 20; allowed: fewer"):
        choose_states(lowered, model, MIB)
    with pytest.raises(ConfigError, match="num_state_slots is 1; allowed: 2 or more"):
        EngineConfig(num_state_slots=1)


def test_a_model_without_states_is_left_as_it_is(tiny_model_dir: Path) -> None:
    runtime, model = resolved(tiny_model_dir)
    assert fit_rows(runtime, model) is runtime
    assert choose_states(runtime, model, 0) is None
    with pytest.raises(ConfigError, match="num_state_slots is 4; allowed for Qwen3ForCausalLM"):
        fit_rows(*resolved(tiny_model_dir, num_state_slots=4))
