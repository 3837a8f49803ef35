"""Fake servers and clients connected to them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("tritonclient.grpc")

from fake_openai import Script, start_openai
from fake_server import Record, start_grpc, start_http

from client import Client


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def grpc_url(record: Record) -> Iterator[str]:
    server, address = start_grpc(record)
    yield f"grpc://{address}"
    server.stop(None).wait()


@pytest.fixture
def http_url(record: Record) -> Iterator[str]:
    server, address = start_http(record)
    yield f"http://{address}"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest) -> str:
    """The test runs once for each protocol."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as connected:
        yield connected


@pytest.fixture
def errors_in_band(record: Record) -> Iterator[SimpleNamespace]:
    """A gRPC server too old to know error statuses in streams."""
    server, address = start_grpc(record, in_band_errors=True)
    yield SimpleNamespace(url=address)
    server.stop(None).wait()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def openai_url(script: Script) -> Iterator[str]:
    """A server of OpenAI's API that follows `script`."""
    server, address = start_openai(script)
    yield address
    server.shutdown()
    server.server_close()
