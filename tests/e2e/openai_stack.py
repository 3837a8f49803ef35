"""An OpenAI-compatible endpoint before a running server, and plain HTTP towards it."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.served import free_ports
from minisgl_backend.host.openai_endpoint import OpenAIEndpoint
from minisgl_backend.host.options.endpoint import EndpointSettings
from tests.e2e.conftest import RunningServer
from tests.e2e.wire import PATIENCE_SECONDS, Server


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint and the server behind it."""

    url: str
    server: Server
    processes: OpenAIEndpoint

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS, **options
        )

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON) of one POST; `body` is bytes or becomes JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = {"Content-Type": "application/json", **(headers or {})}
        return fetch(urllib.request.Request(self.url + path, data, head))

    def get(self, path: str) -> tuple[int, Any]:
        return fetch(urllib.request.Request(self.url + path))


def fetch_url(url: str) -> tuple[int, Any]:
    """(status, the body) of one GET; status 0 where nobody answers."""
    try:
        return fetch(urllib.request.Request(url))
    except OSError:
        return 0, ""


def fetch(request: urllib.request.Request) -> tuple[int, Any]:
    """(status, the body: JSON where it is some, else text)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=PATIENCE_SECONDS) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    with contextlib.suppress(ValueError):
        return status, json.loads(text)
    return status, text


@contextlib.contextmanager
def running_endpoint(server: Server, **settings: Any) -> Iterator[Endpoint]:
    """An endpoint of its own before a server that runs."""
    values = {
        "port": free_ports(1)[0],
        "grpc_address": f"127.0.0.1:{server.grpc}",
        "metrics_address": f"127.0.0.1:{server.metrics_port}",
        **settings,
    }
    configured = EndpointSettings(**values)
    processes = OpenAIEndpoint(configured)
    try:
        yield Endpoint(configured.url, server, processes)
    finally:
        processes.stop()


@contextlib.contextmanager
def scripted_server(
    folder: Path, scripts: Sequence[str | Sequence[int]], parameters: dict[str, str]
) -> Iterator[Server]:
    """A server whose model says script k (a text or token ids) to a request with seed k, and the last one for ever to
    all others."""
    file = folder / "scripts.json"
    file.write_text(json.dumps(list(scripts)), encoding="utf-8")
    with contextlib.ExitStack() as stack:
        os.environ["MINISGL_NULL_RUNNER_SCRIPTS"] = str(file)
        try:
            server = stack.enter_context(RunningServer(folder, {"runner": "null", **parameters}))
        finally:
            del os.environ["MINISGL_NULL_RUNNER_SCRIPTS"]
        yield server
