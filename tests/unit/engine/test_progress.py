"""What a start says of its seconds."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.build import build_engine
from minisgl_backend.engine.progress import LINE_EVERY_S, ProgressReport, StartPhases
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        report = ProgressReport("loading weights")
        report._next_line -= LINE_EVERY_S
        with caplog.at_level(logging.INFO, "minisgl_backend.engine.progress"):
            report(1, 2)
            report(2, 2)
        assert ("loading weights" in stream.getvalue()) == stream.isatty()
        assert caplog.messages == ([] if stream.isatty() else ["loading weights: 1 of 2"])


def test_an_engine_core_imports_no_bars_for_its_log() -> None:
    code = "import sys, minisgl_backend.engine.process; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
