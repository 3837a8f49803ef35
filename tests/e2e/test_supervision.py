"""scripts/serve.sh's supervisor with the real tritonserver over a small repository: what dies comes back.

Each model answers its input with its name appended; no engine is involved.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from benchmarks.served import free_ports
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.triton_server import find_triton_server
from minisgl_backend.process.node_options import SECRET
from minisgl_backend.process.processes import Process, descendants, environment_folder, process_table
from tests.e2e.wire import DEATH, HOSTILE_BODIES, post_raw

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120.0  # far above what is ever needed: the machine may be busy

PLAIN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()) for request in requests]

    def answer(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text[0] + b"!"], dtype=object))])
"""
ENDLESS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.run, args=(request.get_response_sender(),), daemon=True).start()

    def run(self, sender):
        while not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([b"tick"], dtype=object))]))
            time.sleep(0.1)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
input [ { name: "x" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
STEP = """
platform: "ensemble"
ensemble_scheduling { step [ { model_name: "plain" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""


@dataclass
class Service:
    """A running supervisor."""

    process: subprocess.Popen[bytes]
    http: int
    health: int
    log: Path
    grpc: int

    def answer(self, model: str) -> str | None:
        """The model's answer to «hi», None if it gave an error."""
        body = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
        reply = fetch(f"http://127.0.0.1:{self.http}/v2/models/{model}/infer", body)
        return None if reply is None else str(json.loads(reply)["outputs"][0]["data"][0])

    def ready(self) -> bool:
        """What the truthful endpoint says."""
        return fetch(f"http://127.0.0.1:{self.health}/health/ready") is not None

    def noticed_a_death(self) -> bool:
        """Not ready or, where it is ready again before anybody has asked, what the supervisor said."""
        return not self.ready() or re.search(DEATH, self.log.read_text(errors="replace")) is not None

    def stubs(self, model: str) -> list[int]:
        """Process ids of the model's living instances."""
        living = [process for process in descendants(self.process.pid, process_table()) if not process.dead]
        return [process.pid for process in living if f"/{model}/1/model.py" in command_line(process.pid)]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; fails with the server's log otherwise."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"exit code {self.process.poll()}; log:\n{self.log.read_text(errors='replace')}")
            time.sleep(0.05)


def fetch(url: str, body: dict[str, object] | None = None) -> bytes | None:
    """The reply's body; None where there is none or it is an error."""
    request = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except OSError:
        return None


def command_line(pid: int) -> str:
    """All arguments of a process, empty if it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    try:
        find_triton_server()
    except ConfigError as error:
        pytest.skip(str(error))
    # With a space: the Python backend hands paths to a shell without quotes.
    repository = tmp_path / "model repository"
    make_repository(repository)
    with running(repository, tmp_path / "log") as started:
        started.wait(started.ready)
        yield started


def make_repository(repository: Path) -> None:
    for name, code, config in (
        ("plain", PLAIN, 'backend: "python"\ninstance_group [ { count: 2 kind: KIND_CPU } ]\n'),
        ("endless", ENDLESS, 'backend: "python"\nmodel_transaction_policy { decoupled: true }\n'),
        ("wrapped", None, STEP),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}{CONFIG}')
        if code is not None:
            (repository / name / "1" / "model.py").write_text(code)


@contextlib.contextmanager
def running(repository: Path, log: Path, *options: str) -> Iterator[Service]:
    """A supervisor, whether or not its server gets ready."""
    http, grpc, metrics, health = free_ports(4)
    command = [sys.executable, "-m", "minisgl_backend.host.server_supervisor", "--repository", str(repository)]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("health", health)):
        command += [f"--{name}-port", str(port)]
    command += ["--openai-port", "0", *options]
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process:
        try:
            yield Service(process, http, health, log, grpc)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_SECONDS)


def test_a_dead_instance_is_noticed_and_its_model_reloaded(service: Service) -> None:
    assert service.answer("wrapped") == "hi!"
    others = service.stubs("endless")
    os.kill(service.stubs("plain")[0], signal.SIGKILL)
    service.wait(service.noticed_a_death)
    service.wait(service.ready)
    assert service.answer("plain") == "hi!"
    assert service.answer("wrapped") == "hi!"
    assert service.stubs("endless") == others, "other models go on"


def test_streams_of_a_dead_instance_end(service: Service) -> None:
    started, ended = threading.Event(), threading.Event()

    def read() -> None:
        url = f"http://127.0.0.1:{service.http}/v2/models/endless/generate_stream"
        request = urllib.request.Request(url, json.dumps({"x": "go"}).encode())
        with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request) as reply:
            reply.readline()
            started.set()
            reply.read()
        ended.set()

    def answers() -> bool:
        # Not ready alone: that may still be true of the server whose end the death brings about.
        with contextlib.suppress(Exception):
            return service.stubs("endless") not in ([], before) and service.answer("plain") == "hi!"
        return False

    before = service.stubs("endless")
    reader = threading.Thread(target=read)
    reader.start()
    service.wait(started.is_set)  # else the restarted server might get the request, and stream for ever
    os.kill(before[0], signal.SIGKILL)
    service.wait(ended.is_set)
    reader.join()
    service.wait(answers)


def test_a_dead_server_is_restarted(service: Service) -> None:
    server = next(pid for pid in children(service.process.pid) if "bin/tritonserver" in command_line(pid))
    regions, folder = shared_memory_of(service), environment_folder_of(service, server)
    assert regions
    os.kill(server, signal.SIGKILL)
    service.wait(service.noticed_a_death)
    service.wait(service.ready)
    assert service.answer("wrapped") == "hi!"
    assert [region for region in regions if Path("/dev/shm", region).exists()] == []
    assert folder is None or not folder.exists()


@pytest.mark.parametrize("stub_died_before", [False, True])
def test_a_signal_ends_everything_and_leaves_nothing(service: Service, stub_died_before: bool) -> None:
    if stub_died_before:
        os.kill(service.stubs("plain")[0], signal.SIGKILL)
        service.wait(service.noticed_a_death)
        service.wait(service.ready)
    regions = shared_memory_of(service)
    assert regions
    everything = descendants(service.process.pid, process_table())
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(PATIENCE_SECONDS) == 0
    assert_gone(everything, regions)


def assert_gone(processes: Iterable[Process], regions: Iterable[str]) -> None:
    # Who outlives its parent has another one.
    alive = {(process.pid, process.start_ticks) for process in process_table().values() if not process.dead}
    assert [process.pid for process in processes if (process.pid, process.start_ticks) in alive] == []
    assert [region for region in regions if Path("/dev/shm", region).exists()] == []


ADMINISTRATION = (
    ("v2/repository/models/plain/unload", {}),
    ("v2/repository/index", {}),
    ("v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 64}),
    ("v2/logging", {"log_verbose_level": 1}),
    ("v2/trace/setting", {"trace_rate": "1"}),
)


def test_the_server_cannot_be_administered_from_outside(service: Service) -> None:
    for path, body in ADMINISTRATION:
        assert fetch(f"http://127.0.0.1:{service.http}/{path}", body) is None, path
    with grpcclient.InferenceServerClient(f"127.0.0.1:{service.grpc}") as client:
        assert client.is_model_ready("plain")
        for call in (
            lambda: client.unload_model("plain"),
            client.get_system_shared_memory_status,
            client.get_log_settings,
            client.get_trace_settings,
        ):
            with pytest.raises(InferenceServerException, match=r"restricted|minisgl-control"):
                call()
    assert service.answer("plain") == "hi!"


def test_what_is_allowed_is_open(tmp_path: Path) -> None:
    make_repository(tmp_path / "repository")
    with running(tmp_path / "repository", tmp_path / "log", "--allow", "shared-memory,logging") as service:
        service.wait(service.ready)
        with grpcclient.InferenceServerClient(f"127.0.0.1:{service.grpc}") as client:
            client.get_system_shared_memory_status()
            client.get_log_settings()
        for path, _ in ADMINISTRATION[:2]:
            assert fetch(f"http://127.0.0.1:{service.http}/{path}", {}) is None, path


def test_no_body_overflows_the_stack(service: Service) -> None:
    server = next(pid for pid in children(service.process.pid) if "bin/tritonserver" in command_line(pid))
    url = f"http://127.0.0.1:{service.http}/v2/models/endless/generate_stream"
    request = urllib.request.Request(url, json.dumps({"x": "go"}).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as stream:
        for kind, (head, body) in HOSTILE_BODIES.items():
            reply = post_raw(service.http, "/v2/models/plain/generate", head, body)
            assert reply.startswith(b"HTTP/1.1 "), kind
            for _ in range(10):  # the stream goes on
                assert stream.readline(), kind
    assert server in children(service.process.pid)
    assert service.answer("plain") == "hi!"


SLOW = """
import time

class TritonPythonModel:
    def initialize(self, args):
        time.sleep(3600)
"""


def end_of_start(service: Service, status: int = 1) -> str:
    """What the supervisor said in the end, one line; it ends with this status."""
    assert service.process.wait(PATIENCE_SECONDS) == status
    (line,) = [line for line in service.log.read_text().splitlines() if line.startswith("[serve] error: ")]
    return line


def make_slow_repository(tmp_path: Path) -> Path:
    (tmp_path / "slow" / "1").mkdir(parents=True)
    (tmp_path / "slow" / "config.pbtxt").write_text(f'name: "slow"\nbackend: "python"\n{CONFIG}')
    (tmp_path / "slow" / "1" / "model.py").write_text(SLOW)
    return tmp_path


def test_a_start_that_takes_for_ever_ends(tmp_path: Path) -> None:
    with running(make_slow_repository(tmp_path / "repository"), tmp_path / "log", "--start-timeout", "8") as service:
        assert "not ready after 8 s" in end_of_start(service)
    assert not service.stubs("slow")


def test_a_server_that_is_not_ready_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine waits for another node, and would for ever."""
    monkeypatch.setenv(SECRET, "the secret of two nodes")
    rendezvous = f"127.0.0.1:{free_ports(1)[0]}"
    options = ("--tp", "2", "--nodes", "2", "--node-rank", "0", "--rendezvous", rendezvous, "--exit-timeout", "100")
    with running(ROOT / "model_repository", tmp_path / "log", *options) as service:
        service.wait(lambda: "for node 1" in service.log.read_text(errors="replace"))
        regions, everything = shared_memory_of(service), descendants(service.process.pid, process_table())
        service.process.terminate()
        assert service.process.wait(30) == 0
    assert regions
    assert_gone(everything, regions)


def test_options_that_cannot_be_served_end_the_start_with_one_line(tmp_path: Path) -> None:
    with running(ROOT / "model_repository", tmp_path / "log", "--tp", "3") as service:
        error = end_of_start(service, status=2)  # found before the server starts
    assert error == "[serve] error: tp is 3; allowed: a divisor of the model's num_attention_heads, which is 8"
    assert service.log.read_text().count("tp is 3") == 1


def children(pid: int) -> list[int]:
    """Process ids of all that a process started."""
    return [process.pid for process in descendants(pid, process_table())]


def environment_folder_of(service: Service, server: int) -> Path | None:
    """The Python backend's folder below /tmp; None where another server on this machine started just then."""
    table = process_table()
    stubs = [table[pid] for model in ("plain", "endless") for pid in service.stubs(model)]
    folder = environment_folder(table[server], min(stubs, key=lambda process: process.start_ticks))
    assert folder is None or folder.is_dir()
    return folder


def shared_memory_of(service: Service) -> set[str]:
    """Names below /dev/shm that belong to the server's stubs."""
    words = " ".join(command_line(pid) for pid in children(service.process.pid)).split()
    return {word.lstrip("/") for word in words if "shm_region" in word}
