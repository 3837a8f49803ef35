"""A real server of this checkout for tests and load runs: started on free ports, watched, stopped without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from client.metrics import Metrics, fetch_metrics
from minisgl_backend.errors import EngineDeadError
from minisgl_backend.process.processes import Process, descendants, environment_folder, process_table

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 120.0  # far above what anything needs: the machine may be busy
PORTS = (20_000, 32_000)  # below those that Linux takes for connections
PORT_LANES = 16
START_SECONDS = 240.0  # the first start on a machine also reads torch from disk


class Served:
    """One run of `scripts/serve.sh`. Use it as a context; `options` are those of the script."""

    def __init__(self, *options: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.http_port, self.grpc_port, self.metrics_port, self.health_port = free_ports(4)
        self.log = log
        self._options = options
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def http(self) -> str:
        """HOST:PORT of the HTTP endpoint."""
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        """HOST:PORT of the gRPC endpoint."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor's process. Raises EngineDeadError before the start."""
        if self._process is None:
            raise EngineDeadError("the server was not started")
        return self._process

    def __enter__(self) -> Served:
        command = [sys.executable, "-m", "minisgl_backend.host.server_supervisor", "--openai-port", "0"]
        for name in ("http", "grpc", "metrics", "health"):
            command += [f"--{name}-port", str(getattr(self, f"{name}_port"))]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *self._options], cwd=ROOT, stdout=output, stderr=output, env=self._environment
            )
        try:
            self.wait(self.ready, START_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> float:
        """SIGTERM, and the seconds until all is over."""
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return time.monotonic() - started

    def wait(self, condition: Callable[[], bool], timeout: float = PATIENCE_SECONDS) -> float:
        """Seconds until the condition held. Raises EngineDeadError, with the log, where it never did."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > timeout or self.process.poll() is not None:
                code = self.process.poll()
                raise EngineDeadError(f"waited {timeout:g} s in vain (exit code {code}):\n{self.read_log()[-6000:]}")
            time.sleep(0.02)
        return time.monotonic() - started

    def read_log(self) -> str:
        """All that the server said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def readiness(self) -> dict[str, Any]:
        """What the readiness endpoint says; {} where it does not answer."""
        status, body = fetch(f"http://127.0.0.1:{self.health_port}/health/ready")
        return json.loads(body) if status else {}

    def ready(self) -> bool:
        """Whether the server says that it is."""
        return self.readiness().get("ready", False) is True

    def metrics(self) -> Metrics:
        """The server's counters; those of the engine are up to half a second old."""
        return fetch_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics")

    def value(self, name: str, **labels: str) -> float:
        """One metric; 0 where it does not exist yet, or the server is away."""
        with contextlib.suppress(Exception):
            return self.metrics().value(name, **labels) or 0.0
        return 0.0

    def processes(self) -> list[Process]:
        """All living processes of the server, the supervisor's own excepted."""
        return [process for process in descendants(self.process.pid, process_table()) if not process.dead]

    def pids(self, *words: str) -> list[int]:
        """Living processes of the server whose command lines hold all these words."""
        lines = {process.pid: command_line(process.pid) for process in self.processes()}
        return [pid for pid, line in lines.items() if all(word in line for word in words)]

    def core(self, dp_rank: int = 0) -> int:
        """The process of an engine core. Raises EngineDeadError where it does not run."""
        return self.ranks(dp_rank)[0]

    def ranks(self, dp_rank: int = 0) -> list[int]:
        """The processes of the tensor-parallel ranks of an engine core, in order; the first one is the core's own.

        Raises EngineDeadError where the core does not run.
        """
        found = self.pids("minisgl_backend.engine.process") + self.pids("minisgl_backend.engine.follower")
        lines = {pid: command_line(pid).split() for pid in found}
        own = {pid: line for pid, line in lines.items() if _argument(line, "--dp-rank") == dp_rank}
        ranks = {_argument(line, "--rank") or 0: pid for pid, line in own.items()}
        if 0 not in ranks:
            raise EngineDeadError(f"engine core {dp_rank} is not running")
        return [pid for _, pid in sorted(ranks.items())]

    def stubs(self, model: str) -> list[int]:
        """The processes of a model's instances."""
        return self.pids("triton_python_backend_stub", f"/{model}/1/model.py")


class Traces:
    """What a server must not leave behind: processes, shared memory, sockets, the Python backend's folder."""

    def __init__(self, served: Served) -> None:
        self._processes = [*served.processes()]
        words = " ".join(command_line(process.pid) for process in self._processes).split()
        self._regions = {word.lstrip("/") for word in words if "shm_region" in word}
        self._folders = {Path(words[index + 1]) for index, word in enumerate(words) if word == "--socket-dir"}
        self._folders |= {folder for folder in [_environment_folder(self._processes)] if folder is not None}

    def left(self) -> list[str]:
        """Those that are still there."""
        table = process_table()
        now = {process.pid: process.start_ticks for process in table.values() if not process.dead}
        alive = [process.pid for process in self._processes if now.get(process.pid) == process.start_ticks]
        found = [f"process {pid}: {command_line(pid)}" for pid in alive]
        found += [f"/dev/shm/{region}" for region in self._regions if Path("/dev/shm", region).exists()]
        return found + [str(path) for path in self._folders if path.exists()]


def _argument(words: Sequence[str], name: str) -> int | None:
    """The number behind an argument's name; None where it is not among the words."""
    return int(words[words.index(name) + 1]) if name in words[:-1] else None


def _environment_folder(processes: Sequence[Process]) -> Path | None:
    lines = {process.pid: command_line(process.pid).split() for process in processes}
    names = {pid: Path(words[0]).name for pid, words in lines.items() if words}
    servers = [process for process in processes if names.get(process.pid) == "tritonserver"]
    stubs = [process for process in processes if names.get(process.pid) == "triton_python_backend_stub"]
    if not servers or not stubs:
        return None
    return environment_folder(servers[0], min(stubs, key=lambda process: process.start_ticks))


def fetch(url: str, body: object = None, timeout: float = 30.0) -> tuple[int, bytes]:
    """(status, body) of a GET, or of a POST where there is a body (bytes as they are, else as JSON); (0, reason)."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=data), timeout=timeout) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


def command_line(pid: int) -> str:
    """All arguments of a process, empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. Not those that the kernel gives to whoever connects, and none that another worker
    of pytest-xdist may find free at the same moment."""
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % PORT_LANES
    found: list[int] = []
    candidates = [start + lane for start in range(*PORTS, PORT_LANES)]
    random.SystemRandom().shuffle(candidates)  # whatever a test has seeded
    with contextlib.ExitStack() as stack:
        for port in candidates:
            if len(found) == count:
                return found
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
    raise OSError(f"no {count} free ports between {PORTS[0]} and {PORTS[1]}")
