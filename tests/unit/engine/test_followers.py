"""The thread that watches the other ranks, and what the end of a rank that could not start says."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.engine import follower as follower_module
from minisgl_backend.engine import followers as module
from minisgl_backend.engine.followers import Followers
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError, MinisglError
from minisgl_backend.process.liveness import Heartbeat


def test_ranks_that_cannot_be_watched_count_as_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    followers = Followers(EngineConfig(tp=2), Environment.read(), tmp_path)
    ours, theirs = socket.socketpair()
    followers._links.append(ours)
    followers.note_ready()

    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module.select, "select", fails)
    lost, reasons = threading.Event(), list[str]()
    followers.watch(lambda reason: (reasons.append(reason), lost.set()), Heartbeat(30.0))  # type: ignore[arg-type,func-returns-value]
    assert lost.wait(20)
    assert "cannot be watched: [Errno 12]" in reasons[0]
    followers.close()
    theirs.close()


@pytest.mark.parametrize(("error", "status"), [(ConfigError("tp is 3"), 2), (EngineDeadError("rank 0 is lost"), 1)])
def test_only_wrong_options_are_told_as_such(monkeypatch: pytest.MonkeyPatch, error: MinisglError, status: int) -> None:
    """Its node starts a rank again that could not start for another one's sake."""

    def fail(*_: Any) -> Any:
        raise error

    def end(code: int) -> Any:
        raise SystemExit(code)

    for name in ("begin_child", "log_to_stderr"):
        monkeypatch.setattr(follower_module, name, lambda *_, **__: None)
    monkeypatch.setattr(follower_module, "_build", fail)
    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = socket.socketpair()
    arguments = ["--rank", "1", "--dp-rank", "0", "--port", "1", "--link-fd", str(theirs.detach())]
    arguments += ["--config", module._json(EngineConfig(tp=2)), "--environment", module._json(Environment.read({}))]
    with ours:
        try:
            code = follower_module.main(arguments)
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
    assert code == status
