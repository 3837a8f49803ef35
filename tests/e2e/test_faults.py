"""The engine process dies: those who wait are told, and it comes back by itself."""

from __future__ import annotations

import os
import signal
import time

import pytest

from minisgl_backend.process.processes import descendants, process_table
from tests.e2e.wire import PATIENCE_SECONDS, GrpcStream, Server, batched

pytestmark = pytest.mark.e2e


def engine_pids(server: Server) -> list[int]:
    """Processes below the server that run the engine core."""
    found = []
    for process in descendants(server.process_id, process_table()):
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            if b"minisgl_backend.engine.process" in file.read():
                found.append(process.pid)
    return found


def test_a_killed_engine_fails_its_streams_and_starts_again(null_server: Server) -> None:
    restarts = null_server.metrics()["minisgl_engine_restarts_total"]
    streams = [GrpcStream(null_server) for _ in range(3)]
    for stream in streams:
        stream.__enter__()
        stream.send(batched(text_input="Tell me", max_tokens=4000, stream=True, ignore_eos=True))
        assert not stream.receive().error
    pids = engine_pids(null_server)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for stream in streams:
        last = list(stream.answers())[-1]
        # Without its status, UNAVAILABLE: triton_grpc_error beside other streams can end tritonserver 2.51.
        assert "the engine died" in last.error
        stream.__exit__()
    deadline = time.monotonic() + PATIENCE_SECONDS
    status, answer = null_server.generate(text_input="again", max_tokens=4)
    while status != 200 and time.monotonic() < deadline:
        # HTTP `generate` of Triton 2.51 has status 400 for every error of a model.
        assert "engine is not running" in answer["error"]
        time.sleep(0.1)
        status, answer = null_server.generate(text_input="again", max_tokens=4)
    assert status == 200, answer
    null_server.wait_for(lambda found: found["minisgl_engine_restarts_total"] == restarts + 1)
    null_server.wait_for(lambda found: found["minisgl_requests_running"] == 0)
