"""The two clients: `AsyncClient` for an event loop, and `Client` for threads, which runs one."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from .connection import METRICS_VARIABLE, Address, parse_url
from .connection import Protocol as WireProtocol
from .errors import ClientError, ServerError, Unavailable
from .loop_thread import LoopThread, in_loop
from .metrics import Metrics, fetch_metrics
from .request import InferenceRequest, Message, RequestOptions, build_tensors, check_request_id, check_timeout
from .results import Reply, Result
from .stream import AsyncTextStream, Call, TextStream
from .vectors import Embeddings, embedding_fields, embeddings_of, pooling_request, score_fields, scores_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_HEALTH_TIMEOUT = 5.0  # seconds
_CLOSED = "this client is closed; make another one"


class Settings(TypedDict, total=False):
    """Of a client, beside its server and its model."""

    model_version: str  # default: the server chooses
    timeout: float | None  # seconds for a whole answer, of requests without one; default: no limit
    metrics_url: str | None


class PoolingOptions(TypedDict, total=False):
    """Of a request for embeddings or scores; as in RequestOptions."""

    request_id: str | None
    timeout: float | None
    priority: int


class AsyncClient:
    """`Client` for one event loop: the same arguments and methods. Create it inside the running loop."""

    def __init__(
        self,
        url: str | None = None,
        protocol: WireProtocol | None = None,
        model: str = "ensemble",
        *,
        model_version: str = "",
        timeout: float | None = None,
        metrics_url: str | None = None,
    ) -> None:
        self._address = parse_url(url, protocol)
        self._model, self._model_version = model, model_version
        self._timeout = timeout
        host = Address("http", self._address.host, 8002, False).authority
        self.metrics_url = metrics_url or os.environ.get(METRICS_VARIABLE) or f"http://{host}/metrics"
        self._open_transport: _Transport | None = _transport(self._address)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The whole answer to a prompt or to chat messages. Cancelling the task abandons it; the server goes on
        computing."""
        async with self._start(prompt, messages, False, **options) as answer:
            async for _ in answer:
                return await answer.result()
        raise ServerError("the server sent no answer", request_id=answer.request_id)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """The answer in pieces, as the model writes it; iterate it with `async for`."""
        return self._start(prompt, messages, True, **options)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """The embedding of a text, of several, or of the token ids of one. `dimensions`: only the first ones."""
        return embeddings_of(await self._pool(embedding_fields(texts, dimensions, normalize), **options))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[float]:
        """How well each document answers the query."""
        return scores_of(await self._pool(score_fields(query, documents, instruction), **options))

    def _start(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        stream: bool,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncTextStream:
        request_id, timeout = self._checked(request_id, timeout)
        tensors = build_tensors(prompt, messages, stream, priority, options)  # type: ignore[arg-type]
        request = InferenceRequest(self._model, self._model_version, request_id, tensors, stream, timeout)
        return AsyncTextStream(self._transport.start(request), request_id)

    async def _pool(
        self,
        fields: Mapping[str, Any],
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Reply | None:
        """The only response of the model `embedding`, whatever the client's model for texts is."""
        call = self._transport.start(pooling_request(fields, *self._checked(request_id, timeout), priority))
        found = None
        while (reply := await call.receive()) is not None:
            found = reply if reply.outputs else found
        return found

    def _checked(self, request_id: str | None, timeout: float | None) -> tuple[str, float | None]:
        """With the defaults. Raises InvalidRequest."""
        check_request_id(request_id)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        timeout = self._timeout if timeout is None else timeout
        check_timeout(timeout, request_id)
        return request_id, timeout

    async def is_live(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server answers at all."""
        return await self._transport.is_live(timeout)

    async def is_ready(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server and the model take requests."""
        return await self._transport.is_ready(self._model, self._model_version, timeout)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once `is_ready`; raises Unavailable after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not await self.is_ready(timeout=min(_HEALTH_TIMEOUT, timeout)):
            if time.monotonic() >= deadline:
                raise Unavailable(f"{self._model} at {self._address.authority} is not ready after {timeout:g} s")
            await asyncio.sleep(0.1)

    async def metrics(self) -> Metrics:
        """The server's counters now. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(None, fetch_metrics, self.metrics_url)

    async def close(self) -> None:
        """Ends the connection, and what still runs on it. Safe to call twice."""
        transport, self._open_transport = self._open_transport, None
        if transport is not None:
            await transport.close()

    @property
    def _transport(self) -> _Transport:
        if self._open_transport is None:
            raise ClientError(_CLOSED)
        return self._open_transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """A server and one of its models. Threads may share it; each request is independent.

    `url` is HOST:PORT with or without a scheme (grpc, grpcs, http, https); default 127.0.0.1 and the protocol's port.
    Every request may raise the errors of `client.errors`.
    """

    def __init__(
        self,
        url: str | None = None,
        protocol: WireProtocol | None = None,
        model: str = "ensemble",
        **settings: Unpack[Settings],
    ) -> None:
        make = partial(AsyncClient, url, protocol, model, **settings)
        over_http = parse_url(url, protocol).protocol == "http"  # gRPC's library works in one process
        self._open_loop: LoopThread[AsyncClient] | None = LoopThread(make, survives_forks=over_http)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result:
        """The whole answer to a prompt or to chat messages, in one response."""
        return self._loop.run(self._loop.client.generate(prompt, messages=messages, **options))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """The answer in pieces, as the model writes it."""
        loop = self._loop
        return TextStream(loop.run(in_loop(partial(loop.client.stream, prompt, messages=messages, **options))), loop)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **options: Unpack[PoolingOptions],
    ) -> Embeddings:
        """The embedding of a text, of several, or of the token ids of one. `dimensions`: only the first ones."""
        return self._loop.run(self._loop.client.embed(texts, dimensions=dimensions, normalize=normalize, **options))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[float]:
        """How well each document answers the query."""
        return self._loop.run(self._loop.client.score(query, documents, instruction=instruction, **options))

    def is_live(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server answers at all."""
        return self._loop.run(self._loop.client.is_live(timeout))

    def is_ready(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server and the model take requests."""
        return self._loop.run(self._loop.client.is_ready(timeout))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once `is_ready`; raises Unavailable after `timeout` seconds."""
        self._loop.run(self._loop.client.wait_ready(timeout))

    def metrics(self) -> Metrics:
        """The server's counters now. Raises Unavailable."""
        return self._loop.run(self._loop.client.metrics())

    def close(self) -> None:
        """Ends the connection, and what still runs on it. Safe to call twice."""
        loop, self._open_loop = self._open_loop, None
        if loop is not None:
            loop.run(loop.client.close())

    @property
    def _loop(self) -> LoopThread[AsyncClient]:
        if self._open_loop is None:
            raise ClientError(_CLOSED)
        return self._open_loop

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Transport(Protocol):
    def start(self, request: InferenceRequest) -> Call: ...

    async def is_live(self, timeout: float) -> bool: ...

    async def is_ready(self, model: str, version: str, timeout: float) -> bool: ...

    async def close(self) -> None: ...


def _transport(address: Address) -> _Transport:
    if address.protocol == "grpc":
        from .grpc_transport import GrpcTransport

        return GrpcTransport(address.authority, address.secure)
    from .http_transport import HttpTransport

    return HttpTransport(f"{'https' if address.secure else 'http'}://{address.authority}")
