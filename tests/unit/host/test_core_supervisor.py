"""Who runs the core, and when it is started again."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError, EngineDeadError, MinisglError
from minisgl_backend.host import core_supervisor as module
from minisgl_backend.host.core_supervisor import CoreProcess, Supervisor
from minisgl_backend.process.spawn import python_executable


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Scripted:
    """Stands in for CoreProcess: each start does the next thing of the script, the last one for ever."""

    def __init__(self, *script: str) -> None:
        self._script = list(script)
        self.starts: list[str] = []
        self.stopped = threading.Event()

    def __call__(self, config: EngineConfig, socket_dir: Path, core: int) -> Scripted:
        self.starts.append(self._script.pop(0) if len(self._script) > 1 else self._script[0])
        if self.starts[-1] == "no process":
            raise EngineDeadError("the engine core's process cannot be started: no memory")
        if self.starts[-1] == "no pipe":
            raise OSError(errno.EMFILE, "Too many open files")
        return self

    pid = 1

    def wait_ready(self, stop_fd: int) -> None:
        if self.starts[-1] == "refuse":
            raise ConfigError("page_size is 3")
        if self.starts[-1] == "fail":
            raise EngineDeadError("it ended while it started")
        if self.starts[-1] == "start slowly":
            time.sleep(0.6)

    def wait_dead(self, stop_fd: int) -> None:
        if self.starts[-1] == "serve a while":
            time.sleep(0.6)
        if self.starts[-1] == "serve":
            select.select([stop_fd], [], [])

    def stop(self) -> str:
        self.stopped.set()
        return "exit status 1"


@pytest.fixture
def failures() -> list[MinisglError]:
    return []


def test_a_core_that_keeps_dying_is_started_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failures: list[MinisglError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = ["die", "fail", "refuse", "no process", "no pipe", "die", "serve"]
    script = Scripted(*outcomes)
    monkeypatch.setattr(module, "CoreProcess", script)
    monkeypatch.setattr(module, "BACKOFF_S", (0.01, 0.02, 0.04))
    monkeypatch.setattr(logging.getLogger("minisgl_backend"), "handlers", [])  # else each line may be told twice
    monkeypatch.setattr(logging.getLogger("minisgl_backend"), "propagate", True)
    supervisor = Supervisor(EngineConfig(), tmp_path, failures.append)
    supervisor.start()
    wait_for(lambda: len(script.starts) == len(outcomes))
    supervisor.close()
    supervisor.close()
    assert script.starts == outcomes
    assert failures == [], "only the first start is the caller's business"
    assert len(re.findall(r"it starts again in", caplog.text)) == len(outcomes) - 1


def test_only_a_core_that_served_a_while_starts_the_backoff_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[MinisglError], caplog: pytest.LogCaptureFixture
) -> None:
    script = Scripted("die", "start slowly", "start slowly", "serve a while", "die", "serve")
    monkeypatch.setattr(module, "CoreProcess", script)
    monkeypatch.setattr(module, "BACKOFF_S", (0.1, 0.2, 0.4))
    monkeypatch.setattr(module, "STABLE_AFTER_S", 0.5)
    monkeypatch.setattr(logging.getLogger("minisgl_backend"), "handlers", [])  # else each line may be told twice
    monkeypatch.setattr(logging.getLogger("minisgl_backend"), "propagate", True)
    supervisor = Supervisor(EngineConfig(), tmp_path, failures.append)
    supervisor.start()
    wait_for(lambda: len(script.starts) == 6)
    supervisor.close()
    assert re.findall(r"it starts again in (\S+) s", caplog.text) == ["0.1", "0.2", "0.4", "0.1", "0.2"]


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [("refuse", ConfigError), ("fail", EngineDeadError), ("no process", EngineDeadError), ("no pipe", EngineDeadError)],
)
def test_the_first_failure_is_told_and_ends_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[MinisglError], outcome: str, kind: type
) -> None:
    script = Scripted(outcome)
    monkeypatch.setattr(module, "CoreProcess", script)
    first, second = (Supervisor(EngineConfig(), tmp_path, failures.append) for _ in range(2))
    first.start()
    wait_for(lambda: failures)
    second.start()  # the first one holds the lock no longer
    wait_for(lambda: len(failures) == 2)
    assert [type(failure) for failure in failures] == [kind, kind]
    assert len(script.starts) == 2
    first.close()
    second.close()


def test_one_supervisor_of_a_directory_runs_the_core_and_the_next_takes_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[MinisglError]
) -> None:
    scripts = [Scripted("serve"), Scripted("serve")]
    supervisors = [Supervisor(EngineConfig(), tmp_path, failures.append) for _ in scripts]
    monkeypatch.setattr(module, "CoreProcess", scripts[0])
    supervisors[0].start()
    wait_for(lambda: supervisors[0].core_pid is not None)
    monkeypatch.setattr(module, "CoreProcess", scripts[1])
    supervisors[1].start()
    time.sleep(3 * module.LOCK_POLL_S)
    assert scripts[1].starts == []
    supervisors[0].close()
    assert scripts[0].stopped.is_set()
    wait_for(lambda: scripts[1].starts)
    supervisors[1].close()


def test_who_takes_over_a_core_that_served_does_not_give_it_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[MinisglError]
) -> None:
    script = Scripted("fail", "refuse", "no pipe", "serve")
    monkeypatch.setattr(module, "CoreProcess", script)
    monkeypatch.setattr(module, "BACKOFF_S", (0.01, 0.02, 0.04, 0.08))
    supervisor = Supervisor(EngineConfig(), tmp_path, failures.append)
    supervisor.note_ready()  # another one's, which has gone
    supervisor.start()
    wait_for(lambda: len(script.starts) == 4)
    supervisor.close()
    assert failures == []


def test_a_lock_that_cannot_be_made_is_told(tmp_path: Path, failures: list[MinisglError]) -> None:
    supervisor = Supervisor(EngineConfig(), tmp_path / "missing", failures.append)
    supervisor.start()
    wait_for(lambda: failures)
    supervisor.close()
    assert "engine core cannot be started" in str(failures[0])


def test_children_run_this_environments_python() -> None:
    assert os.access(python_executable(), os.X_OK)


def test_a_core_that_is_killed_while_it_starts_is_said_to_be_killed(tmp_path: Path) -> None:
    read, write = os.pipe()
    process = CoreProcess(EngineConfig(runner="null"), tmp_path, 0)
    try:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"\(signal 9: it was killed, most likely for want of memory\)$"):
            process.wait_ready(read)
    finally:
        process.stop()
        os.close(read)
        os.close(write)
