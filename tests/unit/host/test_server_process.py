"""What the supervisor's side of a server does where its own surroundings fail."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host import server_process, server_supervisor
from minisgl_backend.host.options.check import OptionCheck
from minisgl_backend.host.options.server import parse_arguments, say
from minisgl_backend.host.server_log import LogFilter
from minisgl_backend.host.server_process import ServerProcess
from minisgl_backend.host.server_supervisor import Supervisor
from minisgl_backend.host.triton_server import TritonInstall
from minisgl_backend.process.processes import process_of, process_table


def test_a_terminal_that_was_closed_stops_neither_the_log_nor_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's pipe is read to its end, whoever reads what comes of it: a full pipe would hold the server up."""
    read_end, write_end = os.pipe()
    nobody, stderr = os.pipe()
    os.close(nobody)
    server = ServerProcess.__new__(ServerProcess)
    server.__dict__["_log"] = LogFilter()
    with open(stderr, "w", closefd=False) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        pump = threading.Thread(target=server._pump_log, args=(read_end,))
        pump.start()
        for _ in range(100):
            os.write(write_end, b"a line that a model prints\n" * 100)  # more than fits into a pipe
        say("and the supervisor, too")
        os.close(write_end)
        pump.join(20)
        assert not pump.is_alive()
        with contextlib.suppress(OSError):
            closed.close()
    os.close(stderr)


def test_a_server_that_cannot_be_asked_to_drain_is_stopped_all_the_same(tmp_path: Path) -> None:
    server = ServerProcess.__new__(ServerProcess)
    server.__dict__.update(_socket_directory=tmp_path / "missing", _settings=SimpleNamespace(exit_timeout=1))
    assert not server._drain(threading.Event())


INSTALL = TritonInstall(Path("tritonserver"), None, (), Path("/usr/bin"))


def test_a_server_without_room_for_its_sockets_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nsleep 300 &\nwait\n")
    program.chmod(0o755)
    pids: list[int] = []

    def full_disk(repository: Path, pid: int) -> Path:
        pids.append(pid)
        while not any(process.parent == pid for process in process_table().values()):
            time.sleep(0.005)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(server_process, "socket_directory", full_disk)
    with pytest.raises(ConfigError, match=r"sockets cannot be made: .*No space left"):
        ServerProcess(parse_arguments([]).server, INSTALL)
    (pid,) = pids
    assert process_of(pid) is None
    assert not [one for one in process_table().values() if one.session == pid and not one.dead]
    assert not [thread for thread in threading.enumerate() if thread.name == "server-log"]


def test_a_server_that_cannot_be_started_again_is_tried_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Server:
        """Dies at once; the third one ends the supervisor."""

        refusal = None
        exit_code = -9

        def __init__(self, *_: object) -> None:
            starts.append(self)
            if len(starts) == 2:
                raise ConfigError("no room")
            if len(starts) == 3:
                supervisor._stop.set()

        def clean_up(self) -> None:
            cleaned.append(self)

        def stop(self, abandon: threading.Event) -> None:
            cleaned.append(self)

    starts: list[Server] = []
    cleaned: list[Server] = []
    monkeypatch.setattr(server_supervisor, "ServerProcess", Server)
    monkeypatch.setattr(server_supervisor, "_BACKOFF_SECONDS", (0.0,))
    arguments = parse_arguments([])
    supervisor = Supervisor(arguments, arguments.server, INSTALL)
    supervisor._announced = True
    assert supervisor._keep_running() == 0
    assert cleaned == [starts[0], starts[2]]
    assert "error: no room\n" in capsys.readouterr().err


def test_a_first_server_that_cannot_be_started_ends_the_supervisor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(server_supervisor, "ServerProcess", no_room)
    arguments = parse_arguments([])
    assert Supervisor(arguments, arguments.server, INSTALL)._keep_running() == 1
    assert capsys.readouterr().err == "[serve] error: no room\n"


def no_process(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_server_without_a_process_left_for_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(ConfigError, match=r"the server's process cannot be started: .*temporarily unavailable"):
        ServerProcess(parse_arguments([]).server, INSTALL)
    assert len(os.listdir("/proc/self/fd")) == open_files


def living_children() -> set[int]:
    """The processes of this one that live: those that tests before this one share are among them."""
    return {one.pid for one in process_table().values() if one.parent == os.getpid() and not one.dead}


def test_a_server_without_a_thread_left_for_its_log_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 300\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = living_children()
    with pytest.raises(ConfigError, match="the server's process cannot be started: can't start new thread"):
        ServerProcess(parse_arguments([]).server, INSTALL)
    assert living_children() <= before


def test_a_machine_without_a_process_left_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a restart is due; a first start says so and ends."""
    arguments = parse_arguments([])
    supervisor = Supervisor(arguments, arguments.server, INSTALL)
    delays: list[float] = []

    def wait(seconds: float) -> bool:
        delays.append(seconds)
        return len(delays) == 3

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert supervisor._keep_running() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    supervisor._announced = True
    monkeypatch.setattr(supervisor._stop, "wait", wait)
    assert supervisor._keep_running() == 0
    assert delays == list(server_supervisor._BACKOFF_SECONDS[:3])
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "the server's process cannot be started: " in line]) == 3
    assert len(said) == 6


def test_the_check_of_the_options_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    check = OptionCheck(parse_arguments([]).server.repository)
    assert check.refusal() is None
    check.end()
