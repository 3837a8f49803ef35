"""What the endpoint sends to the server, seen by one that only listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.served import free_ports
from minisgl_backend.host.openai_endpoint import OpenAIEndpoint
from minisgl_backend.host.options.endpoint import EndpointSettings
from minisgl_backend.openai.limits import ApiKeys

TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
    "/v1/responses": {"input": "hello"},
}


class Listener(grpc.GenericRpcHandler):
    """Answers every generation with one word, and keeps what was sent."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, str]]] = []

    def service(self, details: Any) -> Any:
        if details.method.endswith("ModelStreamInfer"):
            return grpc.unary_stream_rpc_method_handler(
                self._answer,
                service_pb2.ModelInferRequest.FromString,
                service_pb2.ModelStreamInferResponse.SerializeToString,
            )
        return None

    def _answer(self, request: Any, context: Any) -> Iterator[Any]:
        self.calls.append((request, dict(context.invocation_metadata())))
        response = service_pb2.ModelInferResponse(model_name="ensemble", id=request.id)
        for name, datatype, value in (
            ("text_output", "BYTES", _text("hi")),
            ("finish_reason", "BYTES", _text("stop")),
            ("num_input_tokens", "INT32", struct.pack("<i", 3)),
            ("num_output_tokens", "INT32", struct.pack("<i", 1)),
        ):
            response.outputs.add(name=name, datatype=datatype, shape=[1])
            response.raw_output_contents.append(value)
        yield service_pb2.ModelStreamInferResponse(infer_response=response)


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


@pytest.fixture(scope="module")
def listener() -> Iterator[tuple[Listener, int]]:
    """What listens, and the port of the endpoint before it."""
    found = Listener()
    server = grpc.server(ThreadPoolExecutor(4), handlers=(found,))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (port,) = free_ports(1)
    settings = EndpointSettings(
        port=port,
        grpc_address=f"127.0.0.1:{grpc_port}",
        served_model_names=("one",),
        reasoning_parser="none",
        tenants="user",
    )
    endpoint = OpenAIEndpoint(settings)
    yield found, port
    endpoint.stop()
    server.stop(None).wait()


def ask(port: int, path: str, headers: dict[str, str], **values: Any) -> tuple[str, dict[str, str]]:
    """(body, headers) of the answer."""
    body = json.dumps({**PATHS[path], **values}).encode()
    head = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, head)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as reply:
        return reply.read().decode(), {name.lower(): value for name, value in reply.headers.items()}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_ids_and_traces_go_with_every_generation(listener: tuple[Listener, int], path: str, stream: bool) -> None:
    found, port = listener
    found.calls.clear()
    headers = {"X-Request-Id": "mine-1", "traceparent": TRACE, "tracestate": "vendor=1", "X-Other": "stays"}
    text, answered = ask(port, path, headers, stream=stream)
    assert "hi" in text
    assert answered["x-request-id"] == "mine-1"
    assert len(found.calls) == (2 if path == "/v1/completions" else 1)
    for request, metadata in found.calls:
        assert request.id == "mine-1"
        assert (metadata["traceparent"], metadata["tracestate"]) == (TRACE, "vendor=1")
        assert "x-other" not in metadata
    assert all("mine-1" in line for line in text.splitlines() if '"id":' in line and '"choices"' in line)


def test_what_is_no_header_of_grpc_is_left_out(listener: tuple[Listener, int]) -> None:
    found, port = listener
    found.calls.clear()
    given = {"X-Request-Id": "with blanks", "traceparent": "\xe9", "tracestate": "x" * 600}
    _, answered = ask(port, "/v1/chat/completions", given)
    ((request, metadata),) = found.calls
    assert request.id == answered["x-request-id"] != "with blanks"
    assert "traceparent" not in metadata
    assert metadata["tracestate"] == "x" * 600


@pytest.mark.parametrize(
    ("path", "values", "sent"),
    [
        (
            "/v1/chat/completions",
            {"top_k": 3, "priority": 2, "min_tokens": 4},
            {"top_k": 3, "priority": 2, "min_tokens": 4},
        ),
        ("/v1/completions", {"min_p": 0.5, "ignore_eos": True}, {"min_p": 0.5, "ignore_eos": True, "max_tokens": 16}),
        ("/v1/completions", {"speculative": False}, {"speculative": False, "max_tokens": 16}),
        ("/v1/responses", {"max_output_tokens": 7, "stop": ["x"]}, {"max_tokens": 7, "stop": ["x"]}),
        ("/v1/chat/completions", {"user": "ada"}, {"tenant": "ada"}),
        ("/v1/chat/completions", {"user": "ada", "safety_identifier": "b"}, {"tenant": "b"}),
        ("/v1/completions", {"user": "Zoë"}, {"tenant": "user-c6a12698582fc110"}),
    ],
)
def test_options(listener: tuple[Listener, int], path: str, values: dict[str, Any], sent: dict[str, Any]) -> None:
    found, port = listener
    found.calls.clear()
    ask(port, path, {}, **values)
    for request, _ in found.calls:
        packed = next(one for one in request.inputs if one.name == "sampling_parameters")
        options = json.loads(packed.contents.bytes_contents[0])
        assert sent.items() <= options.items()
        assert options["stream"] is True


def test_a_tenant_may_be_the_place_of_the_key() -> None:
    async def ask_with(key: str) -> Any:
        seen: dict[str, Any] = {}

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.update(scope)

        async def send(message: Any) -> None:
            seen.update(message)

        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": [(b"x-api-key", key.encode())]}
        await ApiKeys(app, ("one", "two"))(scope, lambda: None, send)  # type: ignore[arg-type, return-value]
        return seen.get("state", {}).get("tenant"), seen.get("status")

    asked = [asyncio.run(ask_with(key)) for key in ("one", "two", "three")]
    assert [tenant for tenant, _ in asked] == ["key-1", "key-2", None]


def raw(port: int, head: str, body: bytes = b"") -> bytes:
    """All that is answered to these bytes until the connection ends."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(60)
        try:
            connection.sendall(head.encode() + body)
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:  # it is not read to its end
            pass
    return answer


def test_an_offer_of_another_protocol_is_ignored(listener: tuple[Listener, int]) -> None:
    """Java's clients offer HTTP/2 with every request."""
    body = json.dumps(PATHS["/v1/completions"]).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\n"
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: application/json\r\n"
    )
    answer = raw(listener[1], f"{head}Content-Length: {len(body)}\r\n\r\n", body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    chunked = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    answer = raw(listener[1], f"{head}Transfer-Encoding: chunked\r\n\r\n", chunked)
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", ["GET /" + "a" * 10_000_000, "GET / HTTP/1.1\r\n" + "x: y\r\n" * 2_000_000])
def test_a_head_without_an_end_is_not_kept(listener: tuple[Listener, int], line: str) -> None:
    answer = raw(listener[1], line)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_no_depth_of_a_body_is_a_fault(listener: tuple[Listener, int]) -> None:
    """Near the limit of the interpreter's stack a body can be read but not handed on."""
    for depth in range(800, 1010):
        nested = '{"messages":[{"role":"user","content":"x"}],"documents":[{"a":' + "[" * depth + "]" * depth + "}]}"
        body = nested.encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            "Connection: close\r\nContent-Type: application/json\r\n"
        )
        answer = raw(listener[1], f"{head}Content-Length: {len(body)}\r\n\r\n", body)
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ")), (depth, answer)


def test_more_connections_than_a_shell_allows_files(listener: tuple[Listener, int]) -> None:
    (port,) = free_ports(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 60
    if hard != resource.RLIM_INFINITY and hard < 2 * few + 100:
        pytest.skip("this machine allows few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        endpoint = OpenAIEndpoint(EndpointSettings(port=port, served_model_names=("one",)))
        deadline = time.monotonic() + 30
        while not endpoint.process_ids and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(few)]
            for connection in connections:
                connection.settimeout(60)
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert all(connection.recv(100).startswith(b"HTTP/1.1 200 ") for connection in connections)
    finally:
        endpoint.stop()
