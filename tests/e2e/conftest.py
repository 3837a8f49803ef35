"""The real tritonserver over this project's model repository, started once for all end-to-end tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.served import free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.repository import render_repository
from minisgl_backend.host.triton_server import DIE_WITH_PARENT, find_triton_server
from tests.e2e.wire import Server

if TYPE_CHECKING:
    from tests.e2e.openai_stack import Endpoint

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240.0  # a busy machine; an idle one needs ten
STOP_SECONDS = 50.0  # beside the exit timeout
# What tritonserver prints when it is told to end, and where glibc aborts it. Seldom its own heap is damaged by threads
# that unload models of the Python backend (triton-inference-server/server#8841); it then waits for ever for what those
# held. `minisgl serve` kills it then.
TOLD_TO_END, ABORTED = "Signal (15) received.", "Signal (6) received."


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model behind HTTP, gRPC and metrics on free ports."""
    with RunningServer(tmp_path_factory.mktemp("demo"), {}) as found:
        yield found


@pytest.fixture(scope="session")
def null_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same without a model: 200 tokens a second for each stream, however many there are."""
    with RunningServer(tmp_path_factory.mktemp("null"), {"runner": "null", "null_runner_rate": "200"}) as found:
        yield found


@pytest.fixture(scope="session")
def endpoint(server: Server) -> Iterator[Endpoint]:
    """An OpenAI endpoint of two processes before the demo model's server."""
    from tests.e2e.openai_stack import running_endpoint  # which imports this module

    with running_endpoint(server, workers=2) as found:
        yield found


class RunningServer:
    """A server for the length of a `with` block; its log is shown where it does not start or leaves work behind."""

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, str],
        *,
        fronts: int = 1,
        exit_seconds: int = 10,
        prepare: Callable[[Path], None] = lambda repository: None,
        grpc_port: int = 0,
        options: Sequence[str] = ("--disable-auto-complete-config",),
    ) -> None:
        """`exit_seconds`: how long it waits at its end for requests that are not finished; `prepare` may change the
        rendered repository; `grpc_port` 0: any; `options`: of tritonserver, by default as `minisgl serve` has them."""
        self._folder = folder
        # An answer depends on nobody's company then, to the last bit that tests could see.
        self._parameters = {"dtype": "float32", **parameters}
        self._fronts = fronts
        self._exit_seconds = exit_seconds
        self._prepare = prepare
        self._grpc_port = grpc_port
        self._options = options

    def __enter__(self) -> Server:
        try:
            find_triton_server()
        except ConfigError as error:
            pytest.skip(f"no tritonserver: {error}")
        repository = self._folder / "repository"
        repository.mkdir()
        render_repository(ROOT / "model_repository", repository, self._parameters)
        config = repository / "engine" / "config.pbtxt"
        text = config.read_text(encoding="utf-8")
        assert "count: 1 kind" in text
        config.write_text(text.replace("count: 1 kind", f"count: {self._fronts} kind"), encoding="utf-8")
        self._prepare(repository)
        self._log = self._folder / "log"
        http, grpc, metrics = free_ports(3)
        grpc = self._grpc_port or grpc
        arguments = ["--model-repository", str(repository), "--exit-timeout-secs", str(self._exit_seconds)]
        for kind, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
            arguments += [f"--{kind}-port", str(port)]
        arguments += ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1", *self._options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # As the command `tritonserver` of the environment starts it; it becomes the server.
                [sys.executable, "-m", "minisgl_backend.host.triton_server", DIE_WITH_PARENT, *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(http=http, grpc=grpc, metrics_port=metrics, process_id=self._process.pid)
        self._wait_ready(server)
        return server

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._exit_seconds + STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if ABORTED not in self._tail().partition(TOLD_TO_END)[2]:
                pytest.fail(f"tritonserver did not end: {self._tail()}")
            warnings.warn("tritonserver damaged its own heap while it unloaded, and had to be killed", stacklevel=2)
        # A request that Triton never finished keeps it from ending in time. One may just be ending at the first look.
        looks = [line for line in self._log.read_text(errors="replace").splitlines() if "model versions that" in line]
        assert not looks or "Found 0" in looks[-1], looks[-3:]

    def _wait_ready(self, server: Server) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                pytest.fail(f"tritonserver ended while it started: {self._tail()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{server.http}/v2/health/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self._process.kill()
        pytest.fail(f"tritonserver was not ready after {START_SECONDS:g} s: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]
