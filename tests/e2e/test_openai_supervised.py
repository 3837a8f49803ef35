"""The endpoint under scripts/serve.sh: it starts and stops with the server, in an order that loses no answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.served import Served, free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.process.processes import descendants, process_table
from tests.e2e.openai_stack import fetch_url
from tests.e2e.wire import PATIENCE_SECONDS

pytestmark = pytest.mark.e2e

MESSAGES: Any = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Served, str]]:
    """A supervised server with the null runner, and the endpoint's URL."""
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    (port,) = free_ports(1)
    options = ("--runner", "null", "--null-runner-rate", "100", "--openai-port", str(port))
    with Served(*options, log=tmp_path / "log") as found:
        yield found, f"http://127.0.0.1:{port}"


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


def test_it_comes_back_with_the_server_and_ends_behind_its_answers(served: tuple[Served, str]) -> None:
    server, url = served
    deadline = time.monotonic() + PATIENCE_SECONDS

    def wait_until_answered() -> None:
        while True:
            try:
                client_of(url).chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4)
                return
            except (openai.InternalServerError, openai.APIConnectionError):
                assert time.monotonic() < deadline
                time.sleep(0.05)

    wait_until_answered()
    os.kill(server.pids("bin/tritonserver")[0], signal.SIGKILL)
    while fetch_url(f"{url}/health")[0] == 200:
        assert time.monotonic() < deadline
    wait_until_answered()

    counts: list[int] = []
    begun = threading.Event()

    def read() -> None:
        stream = client_of(url).chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=200, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            begun.set()
            if chunk.usage:
                counts.append(chunk.usage.completion_tokens)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_SECONDS)
    everything = descendants(server.process.pid, process_table())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_SECONDS) == 0
    reader.join(PATIENCE_SECONDS)
    assert counts == [200], "what was begun is finished"
    with pytest.raises(openai.APIConnectionError):
        client_of(url).models.list()
    alive = {(process.pid, process.start_ticks) for process in process_table().values() if not process.dead}
    assert [process.pid for process in everything if (process.pid, process.start_ticks) in alive] == []
