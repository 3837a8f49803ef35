"""When a silent process counts as hanging."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from minisgl_backend.host.liveness import BUSY_HANG_S, IDLE_HANG_S, Liveness, processor_seconds

SLEEPER = "import time; time.sleep(600)"
WORKER = "while True: pass"
COMPILING = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKER!r}])"


@pytest.fixture
def pid(request: pytest.FixtureRequest) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True) as process:
        yield process.pid
        for child in [*_children(process.pid), process.pid]:
            subprocess.run(["kill", "-9", str(child)], check=True)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def silent_for(liveness: Liveness, seconds: float, start: float = 0.0) -> bool:
    """Whether it hangs after looks in every second."""
    return [liveness.hangs(start + second) for second in range(int(seconds) + 1)][-1]


@pytest.mark.parametrize("pid", [SLEEPER], indirect=True)
def test_silence_without_work_is_a_hang(pid: int) -> None:
    time.sleep(0.3)  # its start is work
    liveness = Liveness(pid)
    assert not silent_for(liveness, IDLE_HANG_S - 1)
    liveness.heard()
    assert not silent_for(liveness, IDLE_HANG_S - 1)
    assert silent_for(liveness, IDLE_HANG_S, start=IDLE_HANG_S)


@pytest.mark.parametrize("pid", [SLEEPER], indirect=True)
def test_time_in_which_the_watcher_slept_does_not_count(pid: int) -> None:
    liveness = Liveness(pid)
    liveness.hangs(0.0)
    assert not liveness.hangs(10_000.0)


@pytest.mark.parametrize("pid", [WORKER, COMPILING], indirect=True)
def test_silence_at_work_is_a_hang_only_much_later(pid: int) -> None:
    while processor_seconds(pid) < 0.5:  # so that a child is running by now
        time.sleep(0.01)
    liveness = Liveness(pid)
    liveness.hangs(0.0)
    before = processor_seconds(pid)
    while processor_seconds(pid) < before + 1.0:
        time.sleep(0.01)
    assert not silent_for(liveness, IDLE_HANG_S + 1)
    assert silent_for(liveness, BUSY_HANG_S, start=BUSY_HANG_S)


def test_a_process_that_is_gone_used_nothing() -> None:
    assert processor_seconds(2**30) == 0.0
