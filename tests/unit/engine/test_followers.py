"""The thread that watches the other ranks."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.config import EngineConfig, Environment
from minisgl_backend.engine import followers as module
from minisgl_backend.engine.followers import Followers
from minisgl_backend.host.liveness import Heartbeat


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
