"""Clients of real engine processes, with whatever they hear collected by uid."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from minisgl_backend.config import EngineConfig
from minisgl_backend.delivery.engine_client import EngineClient, Listener
from minisgl_backend.ipc.messages import Outputs, Rejected, Stats, Welcome
from minisgl_backend.request import FinishReason, Request, SamplingParams

START_SECONDS = 120.0  # for a core to start, on a machine with much else to do


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:  # there is none, or none any more
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Front(Listener):
    """An EngineClient and what it has heard."""

    def __init__(self, config: EngineConfig, socket_dir: Path, index: int = 0) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.rejected: dict[int, Rejected] = {}
        self.downs: list[tuple[float, str]] = []  # time.monotonic() seconds, reason
        self.lost: set[int] = set()  # uids that went with them
        self.num_ups = 0
        self.slow = threading.Event()  # set: the callback blocks until it is cleared
        self.client = EngineClient(config, self, front=index, socket_dir=socket_dir)

    def on_rejected(self, rejected: Rejected) -> None:
        self.rejected[rejected.uid] = rejected

    def on_up(self, welcome: Welcome) -> None:
        self.num_ups += 1

    def on_outputs(self, outputs: Outputs) -> None:
        uids = np.frombuffer(outputs.uids, dtype=np.int64).tolist()
        tokens = np.frombuffer(outputs.token_ids, dtype=np.int32).tolist()
        for uid, token, reason in zip(uids, tokens, outputs.reasons, strict=True):
            assert uid not in self.reasons, "a record after the last one"
            if token >= 0:
                self.tokens.setdefault(uid, []).append(token)
            if reason:
                self.reasons[uid] = FinishReason(reason)
        while self.slow.is_set():
            time.sleep(0.005)

    def on_down(self, uids: list[int], reason: str) -> None:
        self.lost.update(uids)
        self.downs.append((time.monotonic(), reason))

    def stats(self, core: int = 0) -> Stats:
        found = self.client.stats(timeout_s=10)[core]
        assert found is not None
        return found

    def submit(self, prompt: list[int], **params: object) -> int:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        uid = self.client.new_uid(sampling.n)
        self.client.submit(Request(uid=uid, token_ids=np.array(prompt, dtype="<i4").tobytes(), params=sampling))
        return uid


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="minisgl-test-", dir="/tmp"))  # socket paths must be short
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_front(socket_dir: Path) -> Iterator[Callable[..., Front]]:
    """Makes started fronts on one socket directory; ends them, and checks that their cores have ended."""
    fronts: list[Front] = []
    pids: set[int] = set()

    def make(config: EngineConfig, index: int = 0) -> Front:
        front = Front(config, socket_dir, index)
        fronts.append(front)
        front.client.start(timeout_s=START_SECONDS)
        note_pids()
        return front

    def note_pids() -> None:
        pids.update(pid for front in fronts for pid in front.client.core_pids if pid is not None)

    yield make
    note_pids()
    for front in fronts:
        front.client.close()
    wait_for(lambda: not any(map(alive, pids)), 10)
