"""tritonserver without scripts/serve.sh: two engine fronts, a hook that drains before SIGTERM, and a sudden death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.served import command_line
from client import Client, ClientError, Unavailable
from minisgl_backend.process.processes import Process, descendants, process_of, process_table
from tests.e2e.conftest import RunningServer
from tests.e2e.wire import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.e2e

RATE = 100  # tokens a second of each stream


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Server]:
    with RunningServer(tmp_path, {"runner": "null", "null_runner_rate": str(RATE)}, fronts=2) as server:
        yield server


class Asking:
    """A request on a thread of its own."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        self.text, self.error = "", None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(server, max_tokens))
        self._thread.start()
        assert self._started.wait(PATIENCE_SECONDS)

    def _run(self, server: Server, max_tokens: int) -> None:
        try:
            with Client(f"127.0.0.1:{server.grpc}", timeout=PATIENCE_SECONDS) as client:
                for chunk in client.stream("Hello", max_tokens=max_tokens, ignore_eos=True):
                    self.text += chunk.text
                    self._started.set()
        except ClientError as error:
            self.error: ClientError | None = error
        finally:
            self._started.set()

    def join(self) -> None:
        self._thread.join(2 * PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "a stream hangs"


def below(server: Server, words: str) -> list[Process]:
    """Living processes of the server whose command lines hold these words."""
    found = [process for process in descendants(server.process_id, process_table()) if not process.dead]
    return [process for process in found if words in command_line(process.pid)]


def ended(processes: list[Process]) -> bool:
    """Whether none of these is alive."""
    now = [process_of(process.pid) for process in processes]
    return all(
        current is None or current.dead or current.start_ticks != before.start_ticks
        for before, current in zip(processes, now, strict=True)
    )


def test_two_fronts_share_one_core_and_both_drain(bare: Server, tmp_path: Path) -> None:
    assert len(below(bare, "engine_0_")) == 2
    (core,) = below(bare, "minisgl_backend.engine.process")
    for process in (core, *below(bare, "tokenizer/1/model.py")):
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), (
            "2 s and 200 MB of what it has no use for"
        )
    streams = [Asking(bare, 60) for _ in range(16)]
    for stream in streams:
        stream.join()
    assert {(stream.error, stream.text) for stream in streams} == {(None, streams[0].text)}
    assert len(streams[0].text) > 60

    streams = [Asking(bare, 4000) for _ in range(8)]
    os.kill(core.pid, signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert isinstance(stream.error, Unavailable), "both fronts tell theirs"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(works(bare) for _ in range(8)):
        assert time.monotonic() < deadline, "both fronts find the new core"

    drains(bare)


def works(server: Server) -> bool:
    stream = Asking(server, 5)
    stream.join()
    return stream.error is None


def drains(server: Server) -> None:
    short, long = [Asking(server, RATE) for _ in range(4)], [Asking(server, 100 * RATE) for _ in range(4)]
    command = [sys.executable, "-m", "minisgl_backend.host.drain", "--pid", str(server.process_id), "--seconds", "8"]
    with subprocess.Popen(command) as hook:
        refused = Asking(server, 5)
        while refused.error is None:  # until all fronts have heard of it
            refused.join()
            refused = Asking(server, 5)
        assert "shutting down" in str(refused.error)
        assert hook.wait(PATIENCE_SECONDS) == 0
    for stream in short:
        stream.join()
        assert stream.error is None, "what can be finished in time is finished"
    for stream in long:
        stream.join()
        assert isinstance(stream.error, Unavailable)
        assert len(stream.text) > 3 * RATE
    os.kill(server.process_id, signal.SIGTERM)


def test_nothing_outlives_a_server_that_was_killed(bare: Server) -> None:
    everything = descendants(bare.process_id, process_table())
    streams = [Asking(bare, 4000) for _ in range(16)]
    os.kill(bare.process_id, signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert stream.error is not None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not ended(everything):
        assert time.monotonic() < deadline, [command_line(process.pid) for process in everything]
        time.sleep(0.1)
