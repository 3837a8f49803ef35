"""The two clients: `Client` for threads, `AsyncClient` for an event loop."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from .connection import METRICS_VARIABLE, Address, parse_url
from .connection import Protocol as WireProtocol
from .errors import ClientError, ServerError, Unavailable
from .metrics import Metrics, fetch_metrics
from .request import InferenceRequest, Message, SamplingOptions, build_tensors, check_request_id, check_timeout
from .results import Reply, Result
from .stream import AsyncCall, AsyncTextStream, Call, TextStream
from .vectors import Embeddings, embedding_fields, embeddings_of, pooling_request, score_fields, scores_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_HEALTH_TIMEOUT = 5.0  # seconds
_CLOSED = "this client is closed; make another one"


class _Settings:
    """Settings that both clients share."""

    def __init__(
        self,
        url: str | None,
        protocol: WireProtocol | None,
        model: str,
        model_version: str,
        timeout: float | None,
        metrics_url: str | None,
    ) -> None:
        self.address: Address = parse_url(url, protocol)
        self.model = model
        self.model_version = model_version
        self.timeout = timeout
        host = Address("http", self.address.host, 8002, False).authority
        self.metrics_url = metrics_url or os.environ.get(METRICS_VARIABLE) or f"http://{host}/metrics"

    def request(
        self,
        prompt: str | None,
        messages: Sequence[Message] | None,
        stream: bool,
        request_id: str | None,
        timeout: float | None,
        priority: int,
        options: SamplingOptions,
    ) -> InferenceRequest:
        check_request_id(request_id)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        timeout = self.timeout if timeout is None else timeout
        check_timeout(timeout, request_id)
        return InferenceRequest(
            model=self.model,
            model_version=self.model_version,
            request_id=request_id,
            tensors=build_tensors(prompt, messages, stream, priority, options),
            stream=stream,
            timeout=timeout,
        )

    def pooling(
        self, fields: Mapping[str, Any], request_id: str | None, timeout: float | None, priority: int
    ) -> InferenceRequest:
        """A request to the model `embedding`, whatever the client's model for texts is."""
        check_request_id(request_id)
        request_id = uuid.uuid4().hex if request_id is None else request_id
        timeout = self.timeout if timeout is None else timeout
        check_timeout(timeout, request_id)
        return pooling_request(fields, request_id, timeout, priority)


class Client:
    """A server and one of its models. Threads may share it; each request is independent.

    `url` is HOST:PORT with or without a scheme (grpc, grpcs, http, https); default 127.0.0.1 and the protocol's port.
    `timeout` (seconds for a whole answer; None: no limit) applies to requests without one.
    Every request may raise the errors of `client.errors`.
    """

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
        self._settings = _Settings(url, protocol, model, model_version, timeout, metrics_url)
        self._open_transport: _Transport | None = _sync_transport(self._settings.address)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """The whole answer to a prompt or to chat messages, in one response.

        `priority` 0 is the default level; otherwise 1 is the most urgent.
        """
        request = self._settings.request(prompt, messages, False, request_id, timeout, priority, options)
        with TextStream(self._transport.start(request), request.request_id) as answer:
            first = next(answer, None)
            if first is None:
                raise ServerError("the server sent no answer", request_id=request.request_id)
            return answer.result()

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> TextStream:
        """The answer in pieces, as the model writes it."""
        request = self._settings.request(prompt, messages, True, request_id, timeout, priority, options)
        return TextStream(self._transport.start(request), request.request_id)

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """The embedding of a text, of several, or of the token ids of one. `dimensions`: only the first ones."""
        fields = embedding_fields(texts, dimensions, normalize)
        return embeddings_of(self._ask(self._settings.pooling(fields, request_id, timeout, priority)))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> list[float]:
        """How well each document answers the query."""
        fields = score_fields(query, documents, instruction)
        return scores_of(self._ask(self._settings.pooling(fields, request_id, timeout, priority)))

    def _ask(self, request: InferenceRequest) -> Reply | None:
        """The only response; reads the call to its end."""
        call, found = self._transport.start(request), None
        while (reply := call.receive()) is not None:
            found = reply if reply.outputs else found
        return found

    def is_live(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server answers at all."""
        return self._transport.is_live(timeout)

    def is_ready(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server and the model take requests."""
        return self._transport.is_ready(self._settings.model, self._settings.model_version, timeout)

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once `is_ready`; raises Unavailable after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.is_ready(timeout=min(_HEALTH_TIMEOUT, timeout)):
            if time.monotonic() >= deadline:
                raise _not_ready(self._settings, timeout)
            time.sleep(0.1)

    def metrics(self) -> Metrics:
        """The server's counters now. Raises Unavailable."""
        return fetch_metrics(self._settings.metrics_url)

    def close(self) -> None:
        """Ends the connection, and what still runs on it. Safe to call twice."""
        transport, self._open_transport = self._open_transport, None
        if transport is not None:
            transport.close()

    @property
    def _transport(self) -> _Transport:
        if self._open_transport is None:
            raise ClientError(_CLOSED)
        return self._open_transport

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
        self._settings = _Settings(url, protocol, model, model_version, timeout, metrics_url)
        self._open_transport: _AsyncTransport | None = _async_transport(self._settings.address)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> Result:
        """The whole answer to a prompt or to chat messages. Cancelling the task abandons it; the server goes on
        computing."""
        request = self._settings.request(prompt, messages, False, request_id, timeout, priority, options)
        async with AsyncTextStream(self._transport.start(request), request.request_id) as answer:
            async for _ in answer:
                return await answer.result()
        raise ServerError("the server sent no answer", request_id=request.request_id)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> AsyncTextStream:
        """The answer in pieces, as the model writes it; iterate it with `async for`."""
        request = self._settings.request(prompt, messages, True, request_id, timeout, priority, options)
        return AsyncTextStream(self._transport.start(request), request.request_id)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[int],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> Embeddings:
        """The embedding of a text, of several, or of the token ids of one. `dimensions`: only the first ones."""
        fields = embedding_fields(texts, dimensions, normalize)
        return embeddings_of(await self._ask(self._settings.pooling(fields, request_id, timeout, priority)))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> list[float]:
        """How well each document answers the query."""
        fields = score_fields(query, documents, instruction)
        return scores_of(await self._ask(self._settings.pooling(fields, request_id, timeout, priority)))

    async def _ask(self, request: InferenceRequest) -> Reply | None:
        """The only response; reads the call to its end."""
        call, found = self._transport.start(request), None
        while (reply := await call.receive()) is not None:
            found = reply if reply.outputs else found
        return found

    async def is_live(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server answers at all."""
        return await self._transport.is_live(timeout)

    async def is_ready(self, timeout: float = _HEALTH_TIMEOUT) -> bool:
        """Whether the server and the model take requests."""
        return await self._transport.is_ready(self._settings.model, self._settings.model_version, timeout)

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Returns once `is_ready`; raises Unavailable after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not await self.is_ready(timeout=min(_HEALTH_TIMEOUT, timeout)):
            if time.monotonic() >= deadline:
                raise _not_ready(self._settings, timeout)
            await asyncio.sleep(0.1)

    async def metrics(self) -> Metrics:
        """The server's counters now. Raises Unavailable."""
        return await asyncio.get_running_loop().run_in_executor(None, fetch_metrics, self._settings.metrics_url)

    async def close(self) -> None:
        """Ends the connection, and what still runs on it. Safe to call twice."""
        transport, self._open_transport = self._open_transport, None
        if transport is not None:
            await transport.close()

    @property
    def _transport(self) -> _AsyncTransport:
        if self._open_transport is None:
            raise ClientError(_CLOSED)
        return self._open_transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class _Transport(Protocol):
    def start(self, request: InferenceRequest) -> Call: ...

    def is_live(self, timeout: float) -> bool: ...

    def is_ready(self, model: str, version: str, timeout: float) -> bool: ...

    def close(self) -> None: ...


class _AsyncTransport(Protocol):
    def start(self, request: InferenceRequest) -> AsyncCall: ...

    async def is_live(self, timeout: float) -> bool: ...

    async def is_ready(self, model: str, version: str, timeout: float) -> bool: ...

    async def close(self) -> None: ...


def _sync_transport(address: Address) -> _Transport:
    if address.protocol == "grpc":
        from .grpc_transport import GrpcTransport

        return GrpcTransport(address.authority, address.secure)
    from .http_transport import HttpTransport

    return HttpTransport(address.authority, address.secure)


def _async_transport(address: Address) -> _AsyncTransport:
    if address.protocol == "grpc":
        from .grpc_transport import AsyncGrpcTransport

        return AsyncGrpcTransport(address.authority, address.secure)
    from .http_transport import AsyncHttpTransport

    return AsyncHttpTransport(address.authority, address.secure)


def _not_ready(settings: _Settings, timeout: float) -> Unavailable:
    return Unavailable(f"{settings.model} at {settings.address.authority} is not ready after {timeout:g} s")
