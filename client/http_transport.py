"""Requests over HTTP: Triton's `generate` for whole answers, `generate_stream` (server-sent events) for streams.

Closing the connection is the only way to cancel a request here. The formats of other servers differ only in the `Post`
and its `BodyFormat` (openai_client.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from .errors import ClientError, ServerError, Unavailable, cancelled_here, from_http, from_message, timed_out
from .request import InferenceRequest
from .results import Reply, real_reason
from .running import RunningCalls

if TYPE_CHECKING:
    import aiohttp

_READ_BYTES = 65536
_ENVELOPE = frozenset(("model_name", "model_version", "id", "sequence_id", "sequence_start", "sequence_end"))
_ASKED_OUTPUTS = ("finish_reason", "num_input_tokens", "num_output_tokens")  # requested by every request of this client
_HEADERS = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Post:
    """A request to be sent."""

    path: str
    body: bytes
    stream: bool  # expects server-sent events instead of one body
    request_id: str
    timeout: float | None  # seconds for the whole answer
    headers: Mapping[str, str] = field(default_factory=dict)  # in addition to the content type


class BodyFormat(Protocol):
    """The format of a server's replies."""

    def decode(self, status: int, text: str) -> Reply | None:
        """Decodes one event's data, or a whole body; None if it is empty. Raises ClientError for an error."""

    def end(self) -> None:
        """The stream has ended. Raises ClientError if that was too early."""


class HttpCall:
    """One request in flight, from now on."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, post: Post, body_format: BodyFormat) -> None:
        self._session = session
        self._base_url = base_url
        self._post = post
        self._deadline = None if post.timeout is None else time.monotonic() + post.timeout
        self._response: aiohttp.ClientResponse | None = None
        self._decoder = ReplyDecoder(post.stream, body_format)
        self._cancelled = False
        self._opening = asyncio.ensure_future(self._open())
        self._opening.add_done_callback(_look_at)

    async def receive(self) -> Reply | None:
        """The next response, None after the last. Raises ClientError."""
        import aiohttp

        if self._cancelled:
            raise cancelled_here(self._post.request_id)
        try:
            return await asyncio.wait_for(self._receive(), self._remaining())
        except (TimeoutError, asyncio.TimeoutError):
            self.cancel()
            raise timed_out(self._post.timeout, self._post.request_id) from None
        except (asyncio.CancelledError, aiohttp.ClientError, ClientError) as error:
            if self._cancelled:  # what else is wrong with the answer is then not the server's fault
                raise cancelled_here(self._post.request_id) from None
            if isinstance(error, aiohttp.ClientError):
                raise Unavailable(self._described(error), request_id=self._post.request_id) from None
            raise

    def cancel(self) -> None:
        self._cancelled = True
        opening = self._opening
        # A response that has just arrived may not have been taken yet: the server would go on without a reader.
        if not opening.cancel() and not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    async def _receive(self) -> Reply | None:
        if self._response is None:
            self._response = await self._opening
            if self._cancelled:  # between the opening and this step
                self._response.close()
            self._decoder.begin(self._response.status)
        while (reply := self._decoder.next()) is None and not self._decoder.ended:
            self._decoder.feed(await self._response.content.readany())
        if reply is None and self._cancelled:
            raise cancelled_here(self._post.request_id)
        return reply

    async def _open(self) -> aiohttp.ClientResponse:
        url, headers = self._base_url + self._post.path, {**_HEADERS, **self._post.headers}
        return await self._session.post(url, data=self._post.body, headers=headers)

    def _described(self, error: aiohttp.ClientError) -> str:
        import aiohttp

        if isinstance(error, aiohttp.ClientConnectorError):
            return f"cannot connect to {self._base_url.partition('://')[2]}: {error.__cause__ or error}"
        return f"the connection broke: {error!r}"

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)


def _look_at(opening: asyncio.Task[Any]) -> None:
    """So that asyncio does not complain of an error that nobody waited for."""
    if not opening.cancelled():
        opening.exception()


class HttpConnections:
    """A server's address, and the connections to it, of one event loop."""

    def __init__(self, base_url: str) -> None:
        """base_url: scheme, host and port."""
        self._base_url = base_url
        self._session: aiohttp.ClientSession | None = None
        self._running = RunningCalls()

    def send(self, post: Post, body_format: BodyFormat) -> HttpCall:
        return self._running.add(HttpCall(self._open_session(), self._base_url, post, body_format))

    async def close(self) -> None:
        self._running.cancel()  # closing the session would leave readers waiting
        if self._session is not None:
            await self._session.close()

    async def answers(self, path: str, timeout: float) -> bool:
        """Whether a GET is answered with 200."""
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._open_session().get(self._base_url + path, timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            # No limit of connections: each stream holds one. The requests have their own deadlines.
            connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session


class HttpTransport(HttpConnections):
    """Requests to Triton's server."""

    def start(self, request: InferenceRequest) -> HttpCall:
        return self.send(_post(request), _bodies(request))

    async def is_live(self, timeout: float) -> bool:
        return await self.answers("/v2/health/live", timeout)

    async def is_ready(self, model: str, version: str, timeout: float) -> bool:
        """Whether server and model are ready."""
        path = f"{model_path(model, version)}/ready"
        return await self.answers("/v2/health/ready", timeout) and await self.answers(path, timeout)


class ReplyDecoder:
    """Bytes of one response body in, replies out."""

    def __init__(self, stream: bool, body_format: BodyFormat) -> None:
        self._stream = stream
        self._format = body_format
        self._status = 200
        self._events = EventParser()
        self._body = bytearray()
        self._replies: deque[Reply] = deque()
        self._error: ClientError | None = None  # behind the replies that came with it
        self.ended = False

    def begin(self, status: int) -> None:
        self._status = status

    def feed(self, data: bytes) -> None:
        """Takes more of the body; nothing marks its end."""
        try:
            self._decode(data)
        except ClientError as error:
            self._error = error

    def next(self) -> Reply | None:
        """Raises ClientError for an error in the body."""
        if self._replies:
            return self._replies.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _decode(self, data: bytes) -> None:
        whole_body = not self._stream or self._status != 200
        if data and not whole_body:
            for event in self._events.feed(data):
                self._take(event)
            return
        self._body += data
        if not data:
            self.ended = True
            if whole_body:
                self._take(_without_event_framing(self._body.decode("utf-8", "replace")))
            else:
                self._format.end()

    def _take(self, text: str) -> None:
        reply = self._format.decode(self._status, text)
        if reply is not None:
            self._replies.append(reply)


class _TritonBodies:
    """Triton's format. It does not mark the end of a stream; the finish reasons, which every request asks for, do."""

    def __init__(self, request_id: str, num_sequences: int = 1) -> None:
        self._request_id = request_id
        self._num_sequences = num_sequences
        self._has_begun = False
        self._gives_reasons = False  # other models behind Triton may not have the requested outputs
        self._seen: set[int] = set()  # indices of sequences
        self._finished: set[int] = set()

    def decode(self, status: int, text: str) -> Reply:
        body = parse_body(status, text, self._request_id)
        if status != 200:
            error = body.get("error", body)
            # Triton's protocol sent to a server with OpenAI's API: reports that server's own message.
            said = error["message"] if isinstance(error, dict) and "message" in error else error
            raise from_http(status, str(said), self._request_id)
        if "error" in body:
            raise from_message(str(body["error"]), self._request_id)
        reply = decode_response(body)
        self._note(reply.outputs)
        return reply

    def end(self) -> None:
        complete = len(self._finished) >= self._num_sequences and self._seen <= self._finished
        if not self._has_begun or (self._gives_reasons and not complete):
            raise ServerError("the stream ended before the answer was complete", request_id=self._request_id)

    def _note(self, outputs: Mapping[str, Sequence[Any]]) -> None:
        """Records which sequences go on and which have ended."""
        self._has_begun = True
        self._gives_reasons = self._gives_reasons or any(name in outputs for name in _ASKED_OUTPUTS)
        reasons = outputs.get("finish_reason", ())
        indices = outputs.get("sequence_index", (0,)) if len(reasons) == 1 else range(len(reasons))
        for index, reason in zip(indices, reasons, strict=False):
            self._seen.add(index)
            if real_reason(reason) is not None:
                self._finished.add(index)


def parse_body(status: int, text: str, request_id: str) -> dict[str, Any]:
    """The JSON object in a body or event. Raises ClientError if there is none."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    if status != 200:
        raise from_http(status, text[:200] or f"HTTP status {status}", request_id)
    raise ServerError(f"the server sent no JSON object: {text[:200]!r}", request_id=request_id)


class EventParser:
    """Server-sent events in pieces of any size -> the data of each whole event.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        events: list[str] = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events


def _post(request: InferenceRequest) -> Post:
    body = encode_request(request)
    return Post(request_path(request), body, request.stream, request.request_id, request.timeout)


def _bodies(request: InferenceRequest) -> _TritonBodies:
    count = request.tensors.get("num_return_sequences")
    return _TritonBodies(request.request_id, int(count.values[0]) if count is not None else 1)


def request_path(request: InferenceRequest) -> str:
    return f"{model_path(request.model, request.model_version)}/{'generate_stream' if request.stream else 'generate'}"


def model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def encode_request(request: InferenceRequest) -> bytes:
    """The JSON of the generate extension; options that are not inputs of the model become request parameters."""
    body: dict[str, Any] = {
        name: list(tensor.values) if tensor.is_list else tensor.values[0] for name, tensor in request.tensors.items()
    }
    if request.request_id:
        body["id"] = request.request_id
    if request.timeout is not None:
        body["timeout"] = int(request.timeout * 1e6)  # microseconds
    return json.dumps(body, ensure_ascii=False).encode()


def decode_response(body: Mapping[str, Any]) -> Reply:
    return Reply(
        {
            name: value if isinstance(value, list) else [value]
            for name, value in body.items()
            if name not in _ENVELOPE and value is not None
        }
    )


def _without_event_framing(text: str) -> str:
    """An error of generate_stream may come as one event or as plain JSON."""
    return text.strip().removeprefix("data:").strip()
