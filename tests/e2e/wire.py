"""Plain HTTP and gRPC towards a running server: what any client would send, without the project's own client."""

from __future__ import annotations

import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from minisgl_backend.process.processes import descendants, process_table

DEATH = r"a process of model \w+ died|the server died"  # in the supervisor's log
PATIENCE_SECONDS = 120.0  # far above what is ever needed: the machine may be busy
LOOK_SECONDS = 0.1  # between looks at metrics that may still change
SETTLED_LOOKS = 30  # without a change: three reports of the latencies

_NUMPY = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "UINT32": np.uint32}


def _hostile(kind: str, body: bytes, length: bool = True) -> tuple[str, bytes]:
    size = f"Content-Length: {len(body)}" if length else "Transfer-Encoding: chunked"
    return f"Content-Type: {kind}\r\n{size}", body


# (head, body) of POSTs. Each of them ended tritonserver 2.51 with the usual stacks: what `curl -d @file` makes of
# 4.1 MB, 40,000 nested brackets, 3 MB of one-byte chunks.
HOSTILE_BODIES = {
    "form": _hostile("application/x-www-form-urlencoded", b'{"text_input":"' + b"x" * 4_100_000 + b'"}'),
    "nesting": _hostile("application/json", b'{"text_input":' + b"[" * 40_000 + b"]" * 40_000 + b"}"),
    "chunks": _hostile("application/json", b"1\r\n[\r\n" * 500_000 + b"0\r\n\r\n", length=False),
}


def post_raw(port: int, path: str, head: str, body: bytes) -> bytes:
    """The first bytes of the reply; none where the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        try:
            connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n".encode() + body)
            return connection.recv(12)
        except ConnectionError:
            return b""


@dataclass
class Chunk:
    """One response of a gRPC stream."""

    outputs: dict[str, Any]  # flat lists
    final: bool
    error: str = ""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the outputs, as they came

    @property
    def text(self) -> str:
        return "".join(self.outputs.get("text_output", []))


@dataclass(frozen=True)
class Server:
    """A running server's ports."""

    http: int
    grpc: int
    metrics_port: int
    process_id: int

    def generate(self, model: str = "ensemble", **body: Any) -> tuple[int, dict[str, Any]]:
        """(HTTP status, JSON body) of one `generate`."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v2/models/{model}/generate", json.dumps(body).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def text(self, model: str = "ensemble", **body: Any) -> str:
        status, answer = self.generate(model, **body)
        assert status == 200, answer
        assert "text_output" in answer, answer
        return str(answer["text_output"])

    def events(self, model: str = "ensemble", **body: Any) -> list[dict[str, Any]]:
        """All events of one `generate_stream`."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v2/models/{model}/generate_stream",
            json.dumps({"stream": True, **body}).encode(),
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
            lines = response.read().decode().splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    def open_stream(self, **body: Any) -> socket.socket:
        """A `generate_stream` whose first events have arrived and are not yet read; close the socket to disconnect."""
        connection = socket.create_connection(("127.0.0.1", self.http), timeout=PATIENCE_SECONDS)
        payload = json.dumps({"stream": True, **body}).encode()
        head = f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (arrived := connection.recv(65536, socket.MSG_PEEK)).count(b"data: ") < 3:
            assert time.monotonic() < deadline, arrived
            time.sleep(0.005)  # looking again at what is there does not wait for more
        return connection

    def stream(self, tensors: Sequence[Tensor], **options: Any) -> Iterator[Chunk]:
        """All responses of one gRPC stream."""
        with GrpcStream(self) as stream:
            stream.send(tensors, **options)
            yield from stream.answers()

    def metrics(self) -> dict[str, float]:
        """This project's metrics: `name` or `name{labels}` -> value."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line.startswith("minisgl_"))
        return {name: float(value) for name, value in samples}

    def wait_for(self, condition: Callable[[dict[str, float]], bool], seconds: float = PATIENCE_SECONDS) -> float:
        """Seconds until the metrics fulfil the condition."""
        start = time.monotonic()
        self.metrics_when(condition, seconds)
        return time.monotonic() - start

    def metrics_when(
        self, condition: Callable[[dict[str, float]], bool], seconds: float = PATIENCE_SECONDS
    ) -> dict[str, float]:
        """The first metrics that fulfil the condition. Another look may find some of the next report's among them."""
        start = time.monotonic()
        while not condition(found := self.metrics()):
            assert time.monotonic() - start < seconds, found
            time.sleep(0.02)
        return found

    def settled_metrics(self) -> dict[str, float]:
        """Metrics in which all that has ended is counted. To be called when nothing is left to run.

        They come four times a second, the latencies once: what ended just now may be neither running nor counted.
        Many looks, and not two with a pause between them: a machine that stands still for that pause counts nothing.
        Metrics that stand still while something runs, or before there are any, are not settled.
        """
        found: dict[str, float] = {}
        same, deadline = 0, time.monotonic() + PATIENCE_SECONDS
        while same < SETTLED_LOOKS:
            assert time.monotonic() < deadline, f"never settled: {found}"
            time.sleep(LOOK_SECONDS)
            last, found = found, self.metrics()
            same = same + 1 if found == last and idle(found) else 0
        return found


def idle(found: dict[str, float]) -> bool:
    """Nothing runs and nothing waits."""
    return found.get("minisgl_requests_running") == found.get("minisgl_requests_waiting") == 0


def all_pages_are_back(found: dict[str, float]) -> bool:
    """No page is leased, and the others add up. The states are set one by one: while they change, they may not."""
    pages = {state: found[f'minisgl_kv_pages{{state="{state}"}}'] for state in ("free", "cached", "leased", "total")}
    return pages["leased"] == 0 and pages["free"] + pages["cached"] == pages["total"] > 0


@dataclass(frozen=True)
class Tensor:
    """One input as a client sends it; the value is nested lists of the full shape."""

    name: str
    dtype: str
    value: Any

    def infer_input(self) -> grpcclient.InferInput:
        if self.dtype == "BYTES":
            array = np.array(self.value, dtype=object)
        else:
            array = np.array(self.value, dtype=_NUMPY[self.dtype])
        tensor = grpcclient.InferInput(self.name, list(array.shape), self.dtype)
        tensor.set_data_from_numpy(array)
        return tensor


class GrpcStream:
    """One gRPC connection with one stream of requests."""

    def __init__(self, server: Server, *, with_codes: bool = False) -> None:
        """`with_codes`: an error has a gRPC status and ends the stream; otherwise it is a message in the stream."""
        self._headers = {"triton_grpc_error": "true"} if with_codes else None
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def __enter__(self) -> GrpcStream:
        self._client.start_stream(lambda result, error: self._queue.put((result, error)), headers=self._headers)
        return self

    def __exit__(self, *_: object) -> None:
        # With codes the server ends the stream by itself, and 2.51 may die (SIGSEGV) of a cancellation at that moment.
        self._client.stop_stream(cancel_requests=self._headers is None)
        self._client.close()

    def send(self, tensors: Sequence[Tensor], *, model: str = "ensemble", **options: Any) -> None:
        self._client.async_stream_infer(model, [tensor.infer_input() for tensor in tensors], **options)

    def receive(self) -> Chunk:
        result, error = self._queue.get(timeout=PATIENCE_SECONDS)
        if error is not None:
            return Chunk({}, True, str(error))
        response = result.get_response()
        final = response.parameters["triton_final_response"].bool_param
        arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
        outputs = {
            name: [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
            for name, array in arrays.items()
        }
        return Chunk(outputs, final, shapes={name: array.shape for name, array in arrays.items()})

    def answers(self) -> Iterator[Chunk]:
        """Until the final response, which is included."""
        final = False
        while not final:
            chunk = self.receive()
            final = chunk.final
            yield chunk


def lasting_processes(server: Server) -> set[int]:
    """Those below the server that live as long as it does: what helps with grammars comes and goes."""
    living = {process.pid for process in descendants(server.process_id, process_table()) if not process.dead}
    commands = {pid: _command_line(pid) for pid in living}
    return {pid for pid, command in commands.items() if command and b"minisgl_backend.grammar." not in command}


def assert_same_processes(before: set[int], ask: Callable[[], set[int]]) -> None:
    """`ask` comes to say what it said before: a compiler that is just being started looks like its parent."""
    deadline = time.monotonic() + 10
    while (now := ask()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert now == before, {pid: _command_line(pid) for pid in now ^ before}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def batched(**values: Any) -> list[Tensor]:
    """Inputs of shape [1, n], as for a model with a batch dimension; types from the values."""
    return [
        Tensor(name, _dtype(value), [value if isinstance(value, list) else [value]]) for name, value in values.items()
    ]


def plain(**values: Any) -> list[Tensor]:
    """Inputs of shape [n], as for a model without a batch dimension."""
    return [
        Tensor(name, _dtype(value), value if isinstance(value, list) else [value]) for name, value in values.items()
    ]


def _dtype(value: Any) -> str:
    one = value[0] if isinstance(value, list) else value
    kinds: Mapping[type, str] = {str: "BYTES", bool: "BOOL", int: "INT32", float: "FP32"}
    return kinds[type(one)]
