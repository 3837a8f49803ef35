"""Streams from any server with OpenAI's API, as chunks like those of Triton's clients."""

from __future__ import annotations

import asyncio
import http.client
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .errors import ClientError, ServerError, Unavailable, from_http, from_message
from .http_transport import HttpConnections, Post, parse_body
from .loop_thread import LoopThread, in_loop
from .metrics import Metrics, fetch_metrics
from .request import Message, SamplingOptions, check_timeout
from .results import Reply
from .stream import AsyncTextStream, TextStream

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_ASK_SECONDS = 10.0  # for all requests but generations
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class OpenAIServer:
    """A server's address, and its API key."""

    host: str
    port: int
    secure: bool  # TLS
    path: str  # before /chat/completions
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> OpenAIServer:
        """`[http[s]://]HOST[:PORT][/PATH]`; the default path is /v1. White space around the key is removed.

        Raises ValueError for an invalid URL, and for a key that an HTTP header cannot contain.
        """
        allowed = "http://HOST:PORT or https://HOST:PORT, with a path like /v1 behind it or not"
        scheme, _, rest = url.rpartition("://")
        scheme = scheme or "http"
        try:
            parts = urlsplit(f"//{rest}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"the server's URL is {url!r} ({error}); allowed: {allowed}") from None
        if scheme not in _DEFAULT_PORTS or not host or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"the server's URL is {url!r}; allowed: {allowed}")
        path = parts.path.rstrip("/") or "/v1"
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            # A secret, so it is not shown.
            raise ValueError("the API key holds a character that is not allowed; allowed: printable ASCII in one line")
        return cls(host, port or _DEFAULT_PORTS[scheme], scheme == "https", path, key or None)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def base_url(self) -> str:
        """Scheme, host and port."""
        return f"{'https' if self.secure else 'http'}://{self.authority}"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def connect(self, timeout: float | None) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        return kind(self.authority, timeout=timeout)

    def models(self, timeout: float = _ASK_SECONDS) -> list[str]:
        """The names of the server's models. Raises ClientError."""
        connection = self.connect(timeout)
        try:
            connection.request("GET", f"{self.path}/models", headers=self.headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"cannot connect to {self.authority}: {error}") from None
        finally:
            connection.close()
        body = parse_body(status, text, "")
        if status != 200:
            raise _error(status, body, "")
        models = body.get("data")
        listed = models if isinstance(models, list) else ()
        return [str(model["id"]) for model in listed if isinstance(model, dict) and "id" in model]

    def choose_model(self, model: str | None) -> str:
        """`model`, or the server's first one. Raises ClientError."""
        if model is not None:
            return model
        models = self.models()
        if not models:
            raise ServerError(f"{self.base_url}{self.path}/models names no model; name one")
        return models[0]


class AsyncOpenAIClient:
    """`OpenAIClient` for one event loop, inside which it is created; connections are kept for the next request."""

    def __init__(self, server: OpenAIServer, model: str, *, timeout: float | None = None) -> None:
        self.server = server
        self.model = model
        self._timeout = timeout
        self._connections = HttpConnections(server.base_url)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> AsyncTextStream:
        """The answer in pieces, as the model writes it; iterate it with `async for`."""
        post = _post(self.server, self.model, prompt, messages, options, self._timeout)
        call = self._connections.send(post, OpenAIBodies(post.request_id))
        return AsyncTextStream(call, post.request_id)

    async def metrics(self) -> Metrics:
        """The server's current counters, if it has a page of them. Raises Unavailable."""
        url = f"{self.server.base_url}/metrics"
        return await asyncio.get_running_loop().run_in_executor(None, fetch_metrics, url)

    async def close(self) -> None:
        """Ends the connections and their running requests."""
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class OpenAIClient:
    """A server and one of its models. Threads may share it; each request is independent.

    `url` is http[s]://HOST[:PORT][/PATH], by default with the path /v1; without `model` it is the server's first one.
    Every request may raise the errors of `errors`.
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout: float | None = None
    ) -> None:
        self.server = OpenAIServer.parse(url, api_key)
        self.model = self.server.choose_model(model)
        self._loop = LoopThread(partial(AsyncOpenAIClient, self.server, self.model, timeout=timeout))

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> TextStream:
        """The answer to a prompt or to chat messages in pieces, as the model writes it."""
        ask = partial(self._loop.client.stream, prompt, messages=messages, **options)
        return TextStream(self._loop.run(in_loop(ask)), self._loop)

    def close(self) -> None:
        """Ends the running requests."""
        self._loop.run(self._loop.client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenAIBodies:
    """Converts the streams of servers with OpenAI's API to the outputs that Triton's clients know."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_output_tokens = 0
        self._complete = False  # a finish reason or [DONE] has arrived

    def decode(self, status: int, text: str) -> Reply | None:
        if status == 200 and text.strip() == "[DONE]":
            self._complete = True
            return None
        body = parse_body(status, text, self._request_id)
        if status != 200 or body.get("error"):
            raise _error(status, body, self._request_id)
        outputs = self._usage(body.get("usage") or {})
        choices = body.get("choices") or ()
        if choices:
            outputs.update(self._choice(choices[0]))
        if not outputs:
            return None  # as in vLLM's first event, which contains the role
        outputs.setdefault("text_output", [""])
        return Reply(outputs)

    def end(self) -> None:
        if not self._complete:
            raise ServerError("the stream ended before the answer was complete", request_id=self._request_id)

    def _usage(self, usage: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The counts cover the whole answer so far; they come with the last event only, or with each."""
        outputs: dict[str, list[Any]] = {}
        if isinstance(usage.get("prompt_tokens"), int):
            outputs["num_input_tokens"] = [usage["prompt_tokens"]]
        if isinstance(total := usage.get("completion_tokens"), int):
            outputs["num_output_tokens"] = [total - self._num_output_tokens]
            self._num_output_tokens = total
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if isinstance(cached, int):
            outputs["num_cached_tokens"] = [cached]
        return outputs

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, list[Any]]:
        delta = choice.get("delta") or {}
        content, thoughts = _parts(delta.get("content"))
        text = choice.get("text") or content
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or thoughts
        outputs: dict[str, list[Any]] = {"text_output": [text]} if text else {}
        if reasoning:
            outputs["reasoning_content"] = [reasoning]
        if choice.get("finish_reason"):
            outputs["finish_reason"] = [choice["finish_reason"]]
            self._complete = True
        if outputs and choice.get("index"):
            outputs["sequence_index"] = [choice["index"]]
        return outputs


def _parts(content: Any) -> tuple[str, str]:
    """Text and reasoning of a delta's content; Mistral's reasoning models send both as lists of parts."""
    if not isinstance(content, list):
        return content or "", ""
    parts = [part for part in content if isinstance(part, dict)]
    texts = [part.get("text") or "" for part in parts if part.get("type") == "text"]
    thoughts = [_parts(part.get("thinking"))[0] for part in parts if part.get("type") == "thinking"]
    return "".join(texts), "".join(thoughts)


def _post(
    server: OpenAIServer,
    model: str,
    prompt: str | None,
    messages: Sequence[Message] | None,
    options: SamplingOptions,
    timeout: float | None,
) -> Post:
    request_id = uuid.uuid4().hex
    check_timeout(timeout, request_id)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **options}
    if messages is None:
        path, body["prompt"] = f"{server.path}/completions", prompt or ""
    else:
        path, body["messages"] = f"{server.path}/chat/completions", list(messages)
    headers = {**server.headers, "X-Request-Id": request_id}
    return Post(path, json.dumps(body).encode(), True, request_id, timeout, headers)


def _error(status: int, body: Mapping[str, Any], request_id: str) -> ClientError:
    """An error in OpenAI's format, or in those of other servers."""
    error = body.get("error")
    code: Any = status
    if isinstance(error, dict):
        message, code = error.get("message") or error, error.get("code", status)
    else:
        message = error or body.get("message") or body.get("detail") or body
    if status != 200:
        return from_http(status, str(message), request_id)
    # An error inside a stream: the status was sent before.
    return (
        from_http(code, str(message), request_id) if isinstance(code, int) else from_message(str(message), request_id)
    )
