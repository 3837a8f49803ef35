"""`minisgl chat` in a pseudo-terminal: over gRPC and HTTP, through OpenAI's API, and with the engine in its process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client.metrics import fetch_metrics
from tests.e2e.openai_stack import Endpoint
from tests.e2e.wire import PATIENCE_SECONDS, Server

pexpect = pytest.importorskip("pexpect")
pytestmark = pytest.mark.e2e

COUNTING = r"17, 18, 19"  # in the middle of a long answer


@pytest.fixture(params=["grpc", "http", "openai", "local"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def terminal(way: str, server: Server, endpoint: Endpoint, tmp_path: Path) -> Iterator[Any]:
    """A chat at its first prompt."""
    source = {
        "grpc": ["--url", f"127.0.0.1:{server.grpc}"],
        "http": ["--url", f"http://127.0.0.1:{server.http}"],
        "openai": ["--openai", endpoint.url],
        "local": ["--local", "demo"],
    }[way]
    child = pexpect.spawn(
        sys.executable,
        ["-m", "client", "chat", *source, "--temperature", "0"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"},
        timeout=60,
        encoding="utf-8",
        dimensions=(24, 200),
    )
    child.expect("lists the commands")
    yield child
    child.close(force=True)


def say(child: Any, line: str, answer: str) -> None:
    child.sendline(line)
    child.expect(answer)


def test_a_conversation(terminal: Any, way: str, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    say(terminal, "What is 17 + 25?", "42[^>]*finish reason stop")
    say(terminal, "Please remember that my city is Rome.", "finish reason stop")
    say(terminal, "What is my city?", "Rome[^>]*finish reason stop")
    say(terminal, f"/save {file}", "6 messages written")
    say(terminal, "/reset", "is forgotten")
    say(terminal, f"/load {file}", "6 messages loaded")
    say(terminal, "What is my city?", "Rome[^>]*finish reason stop")
    cached = r" \([1-9]\d* cached\)"
    say(terminal, "/stats", rf"last answer: first token [^\n]*tokens/s, \d+ tokens in{cached}")
    terminal.expect("session, 4 answers")
    say(terminal, "/system Answer in one word.", "with this system prompt")
    say(terminal, f"/save {file}", "1 messages written")
    assert json.loads(file.read_text()) == [{"role": "system", "content": "Answer in one word."}]

    cancelled = _cancelled(server)
    say(terminal, "/system", "without a system prompt")
    say(terminal, "Count from 1 to 200.", COUNTING)
    terminal.sendintr()
    terminal.expect("stopped")
    say(terminal, "What is 30 + 12?", "42[^>]*finish reason stop")
    if way != "local":
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _cancelled(server) == cancelled:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    terminal.sendline("/exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def _cancelled(server: Server) -> float:
    metrics = fetch_metrics(f"http://127.0.0.1:{server.metrics_port}/metrics")
    return metrics.value("minisgl_requests_cancelled_total") or 0.0
