"""The wish for processors that stay awake: when it is made, when it ends, and what happens where it may not be made."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minisgl_backend.engine.idle_cpus import LINGER_S, IdleCpus


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    return path


def driver(folder: Path, name: str) -> Path:
    path = folder / "current_driver"
    path.write_text(f"{name}\n")
    return path


def test_processors_stay_awake_while_sequences_run_and_a_little_longer(device: Path):
    cpus = IdleCpus("poll", device=device)
    cpus.note(False, 5.0)
    assert not cpus.awake
    cpus.note(True, 6.0)
    assert cpus.awake
    assert device.read_bytes() == bytes(4)
    cpus.note(False, 6.0 + 0.9 * LINGER_S)
    assert cpus.awake
    cpus.note(True, 6.0 + LINGER_S)
    cpus.note(False, 6.0 + 1.5 * LINGER_S)
    assert cpus.awake
    cpus.note(False, 6.0 + 2.5 * LINGER_S)
    assert not cpus.awake
    cpus.note(True, 9.0)
    assert cpus.awake
    cpus.close()
    assert not cpus.awake


@pytest.mark.parametrize(("name", "awake"), [("haltpoll", True), ("intel_idle", False), ("none", False)])
def test_auto_asks_in_a_virtual_machine_only(device: Path, tmp_path: Path, name: str, awake: bool):
    cpus = IdleCpus("auto", device=device, driver=driver(tmp_path, name))
    cpus.note(True, 1.0)
    assert cpus.awake == awake
    cpus.close()


def test_sleep_asks_for_nothing(device: Path, tmp_path: Path):
    cpus = IdleCpus("sleep", device=device, driver=driver(tmp_path, "haltpoll"))
    cpus.note(True, 1.0)
    assert not cpus.awake


@pytest.mark.parametrize(("mode", "level"), [("poll", logging.WARNING), ("auto", logging.INFO)])
def test_where_it_may_not_ask_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, level: int):
    caplog.set_level(logging.INFO)
    cpus = IdleCpus(mode, device=tmp_path / "missing", driver=driver(tmp_path, "haltpoll"))
    for now in range(3):
        cpus.note(True, float(now))
    assert not cpus.awake
    (record,) = caplog.records
    assert record.levelno == level
    assert "idle_cpus" in record.getMessage()
    assert "missing" in record.getMessage()


def test_without_the_file_that_names_the_driver_auto_asks_for_nothing(device: Path, tmp_path: Path):
    cpus = IdleCpus("auto", device=device, driver=tmp_path / "missing")
    cpus.note(True, 1.0)
    assert not cpus.awake
