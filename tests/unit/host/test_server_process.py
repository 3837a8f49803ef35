"""What the supervisor's side of a server does where its own surroundings fail."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl_backend.host.serve_options import say
from minisgl_backend.host.server_log import LogFilter
from minisgl_backend.host.server_process import ServerProcess


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
