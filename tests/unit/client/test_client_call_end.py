"""What a gRPC client does behind an error: it reads on to the end of its call, for a limited time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

import client.grpc_transport
from client import AsyncClient, Cancelled, Client, ClientError, InvalidRequest

WAIT = 10.0  # seconds; generous, nothing here measures time
LATE_SECONDS = 0.1  # how long after an error the server ends the call
DEADLINE_SECONDS = 3.0  # enough for the error to arrive on a slow machine; the call would go on for WAIT
ERROR = "in ensemble 'ensemble', top_p is 7; allowed: above 0 and at most 1"


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with an error inside the stream and ends the call as the prompt says, a little later.

    Like Triton, it ends no call whose client may still send something.
    """

    def __init__(self) -> None:
        self.errors_sent = threading.Semaphore(0)
        self.ended = threading.Event()  # in whatever way
        self.cancelled = threading.Event()  # by the client, before the server had ended the call
        self.stop = threading.Event()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:
        complete = threading.Event()
        context.add_callback(lambda: self._end(complete.is_set()))
        prompt = ""
        for message in requests:
            (prompt,) = (tensor.contents.bytes_contents[0] for tensor in message.inputs if tensor.name == "text_input")
            yield service_pb2.ModelStreamInferResponse(error_message=ERROR)
            self.errors_sent.release()
        time.sleep(LATE_SECONDS)
        if prompt == b"never ends":
            self.stop.wait(WAIT)
        elif prompt == b"never silent":
            while not self.stop.wait(0.001):
                yield service_pb2.ModelStreamInferResponse(error_message="another")
        elif prompt == b"more":
            for _ in range(3):
                yield service_pb2.ModelStreamInferResponse(error_message="another")
        complete.set()
        if prompt == b"status":
            context.abort(grpc.StatusCode.INTERNAL, "a status")

    def _end(self, complete: bool) -> None:
        if not complete:
            self.cancelled.set()
            self.stop.set()
        self.ended.set()


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def address(servicer: Servicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    servicer.stop.set()
    server.stop(None).wait()


@pytest.fixture(params=["threads", "loop"])
def ask(request: pytest.FixtureRequest, address: str) -> Any:
    """Streams a prompt's answer; raises what comes. The test runs once with each client."""

    def ask_from_a_thread(prompt: str, **options: Any) -> None:
        with Client(address) as connected:
            connected.stream(prompt, request_id="r", **options).result()

    async def ask_from_the_loop(prompt: str, **options: Any) -> None:
        async with AsyncClient(address) as connected:
            await connected.stream(prompt, request_id="r", **options).result()

    if request.param == "threads":
        return ask_from_a_thread
    return lambda prompt, **options: asyncio.run(ask_from_the_loop(prompt, **options))


@pytest.fixture
def short_bound(monkeypatch: pytest.MonkeyPatch) -> float:
    seconds = 3 * LATE_SECONDS
    monkeypatch.setattr(client.grpc_transport, "_END_SECONDS", seconds)
    return seconds


@pytest.fixture
def long_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.grpc_transport, "_END_SECONDS", 10 * WAIT)


def is_first_error(error: ClientError) -> bool:
    expected = ("top_p is 7; allowed: above 0 and at most 1", "INVALID_ARGUMENT", "r")
    return (error.message, error.status, error.request_id) == expected


@pytest.mark.usefixtures("long_bound")
@pytest.mark.parametrize("prompt", ["ends", "more", "status"])
def test_a_call_that_ends_is_not_cancelled(servicer: Servicer, ask: Any, prompt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(prompt)
    assert is_first_error(caught.value)
    assert servicer.ended.wait(WAIT)
    assert not servicer.cancelled.is_set()


@pytest.mark.parametrize("prompt", ["never ends", "never silent"])
def test_a_call_that_does_not_end_is_cancelled(servicer: Servicer, ask: Any, prompt: str, short_bound: float) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        ask(prompt)
    assert short_bound <= time.monotonic() - start < WAIT
    assert is_first_error(caught.value)
    assert servicer.cancelled.wait(WAIT)


def test_the_bound_is_about_a_second() -> None:
    assert 0.5 <= client.grpc_transport._END_SECONDS <= 2


@pytest.mark.usefixtures("long_bound")
def test_a_deadline_behind_the_error_changes_nothing(servicer: Servicer, ask: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask("never ends", timeout=DEADLINE_SECONDS)
    assert is_first_error(caught.value)
    assert servicer.cancelled.wait(WAIT), "the deadline did not end the call"


@pytest.mark.usefixtures("long_bound")
def test_closing_ends_the_reading_on(servicer: Servicer, address: str) -> None:
    def close() -> None:
        assert servicer.errors_sent.acquire(timeout=WAIT)
        time.sleep(LATE_SECONDS)
        stream.close()

    with Client(address) as connected:
        stream = connected.stream("never ends", request_id="r")
        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(ClientError) as caught:
            stream.result()
        # A busy machine may close the stream before the error is read.
        assert isinstance(caught.value, Cancelled) or is_first_error(caught.value)
        closer.join()
    assert servicer.cancelled.wait(WAIT)


@pytest.mark.usefixtures("long_bound")
@pytest.mark.parametrize("way", ["stream", "task"])
def test_cancelling_ends_the_reading_on(servicer: Servicer, address: str, way: str) -> None:
    async def use() -> None:
        async with AsyncClient(address) as connected:
            stream = connected.stream("never ends", request_id="r")
            asking = asyncio.ensure_future(stream.result())
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(None, lambda: servicer.errors_sent.acquire(timeout=WAIT))
            await asyncio.sleep(LATE_SECONDS)
            (stream if way == "stream" else asking).cancel()
            with pytest.raises(ClientError if way == "stream" else asyncio.CancelledError) as caught:
                await asking
            if way == "stream":
                assert isinstance(caught.value, Cancelled) or is_first_error(caught.value)
            assert await loop.run_in_executor(None, servicer.cancelled.wait, WAIT)

    asyncio.run(use())
