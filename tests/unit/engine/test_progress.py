"""What a start says of its seconds."""

from __future__ import annotations

import logging

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.progress import StartPhases
from minisgl_backend.environment import Environment


def test_a_phase_lasts_from_the_end_of_the_one_before() -> None:
    times = iter([100.0, 103.5, 103.75])
    phases = StartPhases(lambda: next(times))
    phases.ended("torch")
    phases.ended("weights")
    assert str(phases) == "3.75 s: torch 3.50, weights 0.25"


def test_a_start_says_at_debug_what_its_seconds_went_to(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "minisgl_backend.engine.build"):
        build_engine(EngineConfig(runner="null", num_pages=64), Environment.read({})).close()
    assert any(line.startswith("the engine started in ") and "scheduler" in line for line in caplog.messages)
