"""The process beside a bare server's engine front: it cleans up after the server, however that ended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.host import server_watch
from minisgl_backend.host.server_watch import watch
from minisgl_backend.ipc.channel import socket_directory


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="minisgl-test-"))  # short: sockets have short paths
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(server_watch, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(server_watch, "_LOOK_SECONDS", 0.01)
    yield folder
    shutil.rmtree(folder)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.mark.parametrize("front_left_before", [False, True])
def test_the_sockets_of_a_server_that_has_ended_are_removed(base: Path, front_left_before: bool) -> None:
    with sleeper() as server:
        directory = socket_directory(base / "repository", server.pid)
        (directory / "events").touch()
        starter = os.getppid() - 1 if front_left_before else os.getppid()
        watching = threading.Thread(target=watch, args=(server.pid, starter))
        watching.start()
        server.kill()
        server.wait()
        watching.join(60)
        assert not watching.is_alive()
    assert list(base.iterdir()) == []


def test_the_sockets_of_a_server_that_ended_before_the_first_look_are_removed(base: Path) -> None:
    with sleeper() as server:
        socket_directory(base / "repository", server.pid)
        server.kill()
        server.wait()
        watch(server.pid, os.getppid())
    assert list(base.iterdir()) == []


def test_it_leaves_a_server_that_goes_on_without_the_front(base: Path) -> None:
    with sleeper() as server:
        directory = socket_directory(base / "repository", server.pid)
        watch(server.pid, os.getppid() - 1, linger_s=0.05)
        assert directory.is_dir()
        assert server.poll() is None
        server.kill()
