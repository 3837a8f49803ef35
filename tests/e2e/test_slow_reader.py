"""Clients that ask and do not read: the others get everything, the server's memory stays, and what waits is complete.

Nothing in a Python model can see that a client does not read: tritonserver keeps what the connection does not take. So
the engine finishes such answers, and what they cost is bounded by their length.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from client import Client
from tests.e2e.wire import Server

pytestmark = pytest.mark.e2e

READERS = 16
TOKENS = 600
PROMPT = "Tell me a long story."
GROWTH_MIB = 128  # measured: 5; allocators keep some


def test_clients_that_do_not_read(null_server: Server) -> None:
    with Client(f"127.0.0.1:{null_server.grpc}", timeout=120.0) as client:
        expected = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).text
        before = memory_mib(null_server.process_id)
        lazy = [null_server.open_stream(text_input=PROMPT, max_tokens=TOKENS, ignore_eos=True) for _ in range(READERS)]
        assert client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).text == expected
        null_server.wait_for(lambda found: found["minisgl_requests_running"] == 0)
        assert memory_mib(null_server.process_id) - before < GROWTH_MIB
        for connection in lazy:
            connection.close()
        assert client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).text == expected


def test_what_was_not_read_is_complete_when_it_is(null_server: Server) -> None:
    with Client(f"127.0.0.1:{null_server.grpc}", timeout=120.0) as client:
        expected = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).text
    connection = null_server.open_stream(text_input=PROMPT, max_tokens=TOKENS, ignore_eos=True)
    null_server.wait_for(lambda found: found["minisgl_requests_running"] == 0)
    received = b""
    with connection:
        while b"\r\n0\r\n" not in received:  # the end of a chunked HTTP body
            received += connection.recv(1 << 16)
    assert received.count(b"data: ") > 1
    assert texts(received) == expected


def texts(received: bytes) -> str:
    """The texts of all events."""
    events = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: ")]
    return "".join(json.loads(event)["text_output"] for event in events)


def memory_mib(process_id: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024
