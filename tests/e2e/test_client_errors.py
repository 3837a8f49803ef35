"""Requests that end in an error leave nothing of the client's calls in tritonserver: it ends as quickly as ever."""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from client import AsyncClient, Client, InvalidRequest
from tests.e2e.conftest import RunningServer
from tests.e2e.wire import PATIENCE_SECONDS, Server

pytestmark = pytest.mark.e2e

REQUESTS = 50
AT_ONCE = 8
EXIT_SECONDS = 60  # a server in which a call is left waits for all of it
ENDED_SECONDS = 20.0  # an idle machine needs four; the engine waits this long for a sequence that it believes to run
MODELS = ("ensemble", "vllm_model", "tokenizer", "engine", "detokenizer")


def ask_from_threads(server: Server) -> list[float]:
    """Seconds that each wrong request took until its error was raised."""
    with Client(f"127.0.0.1:{server.grpc}", timeout=PATIENCE_SECONDS) as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(number: int) -> float:
            start = time.monotonic()
            with pytest.raises(InvalidRequest, match="temperature is -4") as caught:
                client.stream("x", temperature=-4, request_id=str(number)).result()
            assert (caught.value.status, caught.value.request_id) == ("INVALID_ARGUMENT", str(number))
            return time.monotonic() - start

        return list(pool.map(ask, range(REQUESTS)))


async def ask_from_a_loop(server: Server) -> list[float]:
    """The same from one event loop."""
    turns = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(f"127.0.0.1:{server.grpc}", timeout=PATIENCE_SECONDS) as client:

        async def ask(number: int) -> float:
            async with turns:
                start = time.monotonic()
                with pytest.raises(InvalidRequest, match="temperature is -4") as caught:
                    await client.stream("x", temperature=-4, request_id=str(number)).result()
                assert (caught.value.status, caught.value.request_id) == ("INVALID_ARGUMENT", str(number))
                return time.monotonic() - start

        return await asyncio.gather(*(ask(number) for number in range(REQUESTS)))


def test_failed_requests_do_not_keep_a_bare_server_from_ending(tmp_path: Path) -> None:
    with RunningServer(tmp_path, {}, exit_seconds=EXIT_SECONDS) as server:
        seconds = {"threads": ask_from_threads(server), "a loop": asyncio.run(ask_from_a_loop(server))}
        stopped = time.monotonic()
    took = time.monotonic() - stopped
    for kind, found in seconds.items():
        print(f"errors after {statistics.median(found):.3f} s (median), {max(found):.3f} s (longest) from {kind}")
    print(f"ended after {took:.1f} s")
    log = (tmp_path / "log").read_text(errors="replace")
    # Each call that is left holds its model; the exit timeout ends the waiting, and nothing is said of what was left.
    assert [model for model in MODELS if f"successfully unloaded '{model}'" not in log] == []
    assert took < ENDED_SECONDS
